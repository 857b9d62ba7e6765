"""`make bench`: all figures, one after the other. Each bench also runs by itself and has its own options (-h)."""

import signal
import subprocess
import sys

_TIDY_SECONDS = 60.0

BENCHES = {
    "bench_gateway": "the gateway beside no proxy, Envoy and smg",
    "bench_endpoints": "what a request costs the gateway on each endpoint, beside chat completions",
    "bench_routes": "what a route that goes by cost costs the gateway, beside the same route without",
    "bench_metrics": "what metrics and traces cost the gateway, side by side",
    "bench_prefix": "prompts that find their prefix in a cache, by rule of routing",
    "bench_routing": "time to first token, hits and throughput by rule of routing, over traces and generated traffic",
    "bench_routing --held-out": "the same over traffic by which no weight was chosen: the table of docs/routing.md",
    "routing_closed": "the same with clients that wait for each answer, behind prompts that no single cache holds",
    "bench_routing --cost": "CPU and memory of what a gateway knows of prefix caches, and a gateway that starts again",
    "bench_replicas --traffic chat prompts unique mooncake adapters adapters-zipf": "rules of routing on four real "
    "engines, beside smg; needs images/engine-cpu/install.sh",
    "bench_rollouts": "rollouts of the gateways under keep-alive clients: resets",
    "bench_advise": "how near advice comes to the truth of the engine model, and what it costs a request",
    "bench_transport": "what mutual TLS costs the gateway and beside each engine, side by side",
    "bench_quota": "limits that four gateways share: a burst, the bound, and what a request costs",
    "bench_spool": "durable records of a gateway: per second, bytes, and how long a start takes",
    "bench_ledger": "records taken and questions answered, SQLite beside PostgreSQL",
    "bench_reconcile": "what keeping and comparing engines' counters costs",
    "bench_requestlog": "what an entry of the request log costs",
    "bench_forms": "what forms with audio hold in the gateway's memory while their engine takes them",
    "bench_hold": "8,000 requests that wait for a replica: memory, release, wake",
    "bench_fetch": "fetching weights beside a plain copy",
    "bench_cache": "staging with and without the node cache",
    "bench_lab": "time to a served answer in the lab",
    "bench_sizing": "sizing beside the real engine and its own functions",
    "bench_gpu": "an engine on a real GPU beside what sizing predicts of it; needs a GPU",
    "bench_packing": "packing, and how long a plan takes",
    "bench_operator": "500 Models at once",
    "bench_devices": "1,000 nodes with 8 devices each: start, a slice that changes, devices that sicken, and quiet",
    "bench_pools": "1,000 Models with an InferencePool each: making them, and a gateway that comes",
    "bench_wake": "from a held request to /scale, and what an idle fleet costs",
    "bench_adapters": "2,000 adapters on 20 replicas: hit rate, movement, and how long a plan takes",
    "bench_swap": "swapping adapters: the engine's own times, simulated and real",
    "bench_adapter_files": "first use of an adapter: from the object store to the first token, by stage",
    "bench_ensure": "the agent's own time on top of an adapter's load",
    "bench_lora_operator": "20,000 adapters in one operator: time to available, memory, quiet writes",
    "bench_protocol": "the protocol of drains, in every order of events",
    "bench_streams": "what listening to 2,000 agents and 8 gateways costs",
    "bench_keda_scaler": "500 ScaledObjects at the external scaler: CPU, calls, and from a decision to KEDA",
    "bench_drivers": "built in, KEDA with Shoal's scaler, KEDA with Prometheus: the same trace in the same lab",
    "bench_scaling": "scaling rules beside those of HPA, KEDA, KPA, AIBrix and llm-d, replayed",
}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed: list[str] = []
    for bench, what in BENCHES.items():
        print(f"\n=== {what} (python -m tests.bench.{bench})", flush=True)
        module, *options = bench.split()
        if _run([sys.executable, "-m", f"tests.bench.{module}", *options, *sys.argv[1:]]):
            failed.append(bench)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: list[str]) -> int:
    """Exit status of a bench. Who stops all benches stops it too, and waits until it has tidied up."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except SystemExit:
        # Told by us alone; Ctrl-C tells the whole group.
        process.send_signal(signal.SIGTERM)
        raise
    finally:
        process.wait(_TIDY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
