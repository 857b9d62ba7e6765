"""What Prometheus sees of the fleet, while this operator leads: one that does not shows nothing, so that sums over the
operators' pods count everything once.

objects.py  gauges read from the store when they are scraped: Models, GPU classes, LoRAPools
events.py   counters and histograms of what happened in this process: decisions, wakes, cold starts
"""

from shoal.controllers.metrics.events import EventMetrics
from shoal.controllers.metrics.objects import ObjectMetrics

__all__ = ["EventMetrics", "ObjectMetrics"]
