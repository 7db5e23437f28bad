"""Run llama.cpp's own server, its continuous batching included, from the package xllamacpp; stop it with a signal.

    python llamacpp_server.py MODEL.gguf --port 8081 --threads 2 --parallel 8 --context 1024

Needs xllamacpp, which is that server as a library: run it with the interpreter of the llama.cpp peer.
"""

import argparse
import signal
from pathlib import Path

import xllamacpp


def main() -> None:
    """Serve until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="for decoding and for prompts")
    parser.add_argument("--parallel", type=int, required=True, help="rows (slots) that run at once")
    parser.add_argument("--context", type=int, required=True, help="tokens of each row")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = str(args.model)
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_parallel, params.n_ctx = args.parallel, args.parallel * args.context
    params.cont_batching = params.use_jinja = True
    server = xllamacpp.Server(params)
    print(server.listening_address, xllamacpp.get_system_info(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
