"""Models whose driver is KEDA: ScaledObjects, and what KEDA is answered.

answers.py   where the external scaler gets its answers
"""
