"""Measure one system: read the arguments, time every prompt length once, print one line of JSON.

    python runners.py SYSTEM MODEL --threads N
    python runners.py SYSTEM MODEL --threads N --together 1 8 --prompts 128     # requests at once instead
    python runners.py SYSTEM MODEL --threads N --first --prompts 32             # opening it and one token instead
    python runners.py SYSTEM MODEL --threads N --image 1024 768                 # an image and one token instead
    python runners.py SYSTEM MODEL --threads N --logits FOLDER                  # logits and bytes of weights instead

Runs in the system's interpreter, which need not have llmc; each import is done where it is needed.
"""

import argparse
import ctypes
import importlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 4  # new tokens of the untimed call before each timed one: loads pages, allocates, builds kernels
MICRO_BATCH = 512  # llama.cpp's default
QUESTION = "What is to be seen?"
IMAGE_TOKENS = 4096  # room for an image of the largest size

PHASES = ("prefill", "decode")
# Operators whose inputs are not matrices: no system quantizes norm weights and rotary tables.
VECTOR_READERS = ("Normalization", "LayerNorm", "Attention", "RotaryEmbedding")
Logits = Iterable[Any]  # float32 [n, V] of consecutive tokens; each array is overwritten by the next


def time_steps(prefill: Callable[[], None], step: Callable[[], None], new_tokens: int) -> tuple[float, float]:
    """Time a system token by token: ``prefill`` computes the first new token, each ``step`` one more."""
    started = time.perf_counter()
    prefill()
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        step()
    return first - started, time.perf_counter() - first


def check_count(generated: int, expected: int) -> None:
    if generated != expected:
        raise SystemExit(f"{generated} tokens generated, {expected} expected")


def graph_bytes(graph: Path) -> int:
    """Bytes of an ONNX graph's matrices, scales included. A tensor that two nodes share counts once."""
    import onnx_ir as ir

    sizes: dict[Any, int] = {}
    for value in ir.load(graph).graph.initializers.values():
        readers = [node.op_type for node, _ in value.uses()]
        if value.const_value is None or all(reader.endswith(VECTOR_READERS) for reader in readers):
            continue
        tensor = value.const_value
        location = (tensor.location, tensor.offset) if isinstance(tensor, ir.ExternalTensor) else value.name
        sizes[location] = max(sizes.get(location, 0), tensor.nbytes)
    return sum(sizes.values())


class System:
    """One system with its open model. All answers are greedy, start from an empty cache, and ignore the end token.

    Each subclass has ``generate``, ``logits`` and ``matrix_bytes``; some also have ``together`` and ``look``.
    """

    modules: tuple[str, ...] = ()  # imported before the timer for opening the system starts

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def generate(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        """Seconds until the first new token, and from the first new token to the last."""
        raise NotImplementedError

    def together(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds from the first of several concurrent prompts to the last of ``new_tokens`` tokens of each."""
        raise SystemExit(f"{type(self).__name__} is not measured with requests at once")

    def look(self, picture: Any) -> tuple[float, int]:
        """Answer a question about a picture, uint8 [height, width, 3]: seconds to the first token, prompt's tokens."""
        raise SystemExit(f"{type(self).__name__} is not measured with images")

    def logits(self, tokens: list[int], step: int) -> Logits:
        """Logits of a window, fed ``step`` tokens at a time."""
        raise NotImplementedError

    def matrix_bytes(self) -> dict[str, int]:
        """Bytes of the matrices that each phase reads, scales included."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the system has reached its full speed."""


class Llmc(System):
    """A bundle; ``load`` and ``generate`` as a user calls them, timed by the result's own timings."""

    modules = ("llmc.runtime.loading", "onnxruntime")

    def __init__(self, args: argparse.Namespace) -> None:
        from llmc.runtime import load

        super().__init__(args)
        self._model = load(args.model, threads=args.threads)

    def generate(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        timings = self._model.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True).timings
        return timings.ttft_s, timings.decode_s

    def together(self, prompts: list[list[int]], new_tokens: int) -> float:
        started = time.perf_counter()
        handles = [self._model.stream(p, max_tokens=new_tokens, temperature=0, ignore_eos=True) for p in prompts]
        results = [handle.result() for handle in handles]
        seconds = time.perf_counter() - started
        for result in results:
            check_count(len(result.token_ids), new_tokens)
        return seconds

    def look(self, picture: Any) -> tuple[float, int]:
        started = time.perf_counter()
        content = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
        result = self._model.chat([{"role": "user", "content": content}], max_tokens=1, temperature=0, ignore_eos=True)
        return time.perf_counter() - started, result.usage.prompt_tokens

    def logits(self, tokens: list[int], step: int) -> Logits:
        from llmc.runtime.sessions import Phase

        return [self._model.runner.logits(tokens, Phase(PHASES[step == 1]))]

    def matrix_bytes(self) -> dict[str, int]:
        graphs = self._model.manifest.graphs
        return {phase: graph_bytes(self.args.model / graphs[phase].file) for phase in PHASES}

    def settle(self) -> None:
        from llmc.runtime.host import huge_pages

        huge_pages.settle()


class LlamaCpp(System):
    """A GGUF file through the C interface: prompts in batches, then one token of each sequence per call.

    The arg max is numpy's, on llama.cpp's buffer of logits.
    """

    modules = ("llama_cpp",)

    def __init__(self, args: argparse.Namespace) -> None:
        import llama_cpp

        super().__init__(args)
        self._api, most = llama_cpp, max(args.together or [1])
        positions = most * (max(args.prompts) + args.new_tokens) + bool(args.image) * IMAGE_TOKENS
        self._size = max(llama_cpp.llama_context_default_params().n_batch, most)
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # ctypes keeps no reference
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        defaults = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(args.model).encode(), defaults)
        if not self._model:
            raise SystemExit(f"{args.model}: llama.cpp cannot load it; write it with convert_gguf.py")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = positions, self._size, MICRO_BATCH
        parameters.n_seq_max, parameters.n_threads, parameters.n_threads_batch = most, args.threads, args.threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"{args.model}: llama.cpp cannot make a context of {positions} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self._size, 0, 1)
        self._latest: dict[int, tuple[int, int]] = {}  # by sequence, the next token and its position
        self._tower = self._open_tower() if args.image else None

    def generate(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        return time_steps(lambda: self._prefill([prompt]), self._step, new_tokens)

    def together(self, prompts: list[list[int]], new_tokens: int) -> float:
        return sum(time_steps(lambda: self._prefill(prompts), self._step, new_tokens))

    def look(self, picture: Any) -> tuple[float, int]:
        """With llama.cpp's own image library, and the tower that convert_gguf.py wrote beside the model."""
        from llama_cpp import mtmd_cpp as mtmd

        started, end = time.perf_counter(), self._api.llama_pos()
        self._clear()
        height, width = picture.shape[:2]
        text = mtmd.mtmd_default_marker() + QUESTION.encode()
        prompt = mtmd.mtmd_input_text(text, len(text), True, True)
        pixels = picture.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap, chunks = mtmd.mtmd_bitmap_init(width, height, pixels), mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        failed = mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(prompt), bitmaps, 1)
        batch = self._api.llama_context_default_params().n_batch
        failed = failed or mtmd.mtmd_helper_eval_chunks(
            self._tower, self._context, chunks, 0, 0, batch, True, ctypes.byref(end)
        )
        if failed:
            raise SystemExit(f"llama.cpp cannot take a picture of {width} x {height}: {failed}")
        self._last_logits(1).argmax()
        seconds, tokens = time.perf_counter() - started, mtmd.mtmd_helper_get_n_tokens(chunks)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return seconds, tokens

    def logits(self, tokens: list[int], step: int) -> Logits:
        self._clear()
        for start in range(0, len(tokens), step):
            yield self._call([(t, i, 0, True) for i, t in enumerate(tokens[start : start + step], start)])

    def matrix_bytes(self) -> dict[str, int]:
        import gguf

        matrices = [tensor for tensor in gguf.GGUFReader(self.args.model).tensors if len(tensor.shape) > 1]
        return dict.fromkeys(PHASES, sum(int(tensor.n_bytes) for tensor in matrices))

    def _open_tower(self) -> Any:
        from llama_cpp import mtmd_cpp as mtmd

        parameters = mtmd.mtmd_context_params_default()
        parameters.use_gpu, parameters.print_timings, parameters.n_threads = False, False, self.args.threads
        mtmd.mtmd_log_set(self._silent, ctypes.c_void_p(0))
        path = self.args.model.with_name(f"{self.args.model.name.rpartition('-')[0]}-mmproj.gguf")
        if not (tower := mtmd.mtmd_init_from_file(str(path).encode(), self._model, parameters)):
            raise SystemExit(f"{path}: llama.cpp cannot load it; write it with convert_gguf.py")
        return tower

    def _prefill(self, prompts: list[list[int]]) -> None:
        self._clear()
        entries = [(t, i, s, i + 1 == len(p)) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        for start in range(0, len(entries), self._size):
            self._feed(entries[start : start + self._size])

    def _step(self) -> None:
        self._feed([(token, position, s, True) for s, (token, position) in self._latest.items()])

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _feed(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Feed (token, position, sequence, last) in one call; keep the token that follows each last one."""
        lasts = [(sequence, position) for _, position, sequence, last in entries if last]
        for (sequence, position), logits in zip(lasts, self._call(entries), strict=True):
            self._latest[sequence] = int(logits.argmax()), position + 1

    def _call(self, entries: list[tuple[int, int, int, bool]]) -> Any:
        """Logits [lasts, V] of (token, position, sequence, last) fed in one call."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, last) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._api.llama_decode(self._context, batch) != 0:
            raise SystemExit(f"llama_decode failed on {len(entries)} tokens")
        return self._last_logits(sum(last for *_, last in entries))

    def _last_logits(self, count: int) -> Any:
        import numpy as np

        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (count, self._vocabulary))


class OpenVino(System):
    """A folder of ``optimum-cli export openvino``, with the pipelines that users call.

    The number of threads is set, because OpenVINO's default counts physical cores, not this process's CPUs.
    """

    modules = ("openvino", "openvino_genai")

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino
        import openvino_genai as genai

        super().__init__(args)
        options = {"INFERENCE_NUM_THREADS": args.threads}
        if args.logits:  # pipelines return none: use the graph itself, with the plugin's defaults, like a pipeline
            self._graph = openvino.Core().read_model(args.model / "openvino_model.xml")
            self._request = openvino.compile_model(self._graph, "CPU", options).create_infer_request()
        elif args.together:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1  # GB, more than these requests need; a pipeline requires it
            self._pipeline = genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", options)
        else:
            self._pipeline = genai.LLMPipeline(str(args.model), "CPU", **options)

    def generate(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        import numpy as np
        import openvino
        import openvino_genai

        ids = openvino.Tensor(np.array([prompt], np.int64))  # (1, P)
        mask = openvino.Tensor(np.ones((1, len(prompt)), np.int64))
        inputs = openvino_genai.TokenizedInputs(ids, mask)
        metrics = self._pipeline.generate(inputs, self._greedy(new_tokens)).perf_metrics
        check_count(metrics.get_num_generated_tokens(), new_tokens)
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean * (new_tokens - 1) / 1e3

    def together(self, prompts: list[list[int]], new_tokens: int) -> float:
        import numpy as np
        import openvino

        started = time.perf_counter()
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        answers = self._pipeline.generate(ids, [self._greedy(new_tokens)] * len(ids))
        seconds = time.perf_counter() - started
        for answer in answers:
            check_count(len(answer.m_generation_ids[0]), new_tokens)
        return seconds

    def logits(self, tokens: list[int], step: int) -> Logits:
        import numpy as np

        self._request.reset_state()
        for start in range(0, len(tokens), step):
            end = min(start + step, len(tokens))
            inputs = {
                "input_ids": np.array([tokens[start:end]], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "beam_idx": np.array([0], np.int32),
                "position_ids": np.arange(start, end)[None],
            }
            yield self._request.infer(inputs)["logits"][0]

    def matrix_bytes(self) -> dict[str, int]:
        constants = (node for node in self._graph.get_ops() if node.get_type_name() == "Constant")
        return dict.fromkeys(PHASES, sum(node.get_byte_size() for node in constants))

    @staticmethod
    def _greedy(new_tokens: int) -> Any:
        """The configuration for answers of exactly so many tokens."""
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        return config


class Genai(System):
    """A folder of onnxruntime-genai's model builder, in the token loop of its examples."""

    modules = ("onnxruntime_genai",)

    def __init__(self, args: argparse.Namespace) -> None:
        import onnxruntime_genai

        super().__init__(args)
        self._library, config = onnxruntime_genai, onnxruntime_genai.Config(str(args.model))
        # Set, because the default is half the cores.
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": args.threads}}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        length = len(prompt) + new_tokens + 1  # it stops at the maximum; the minimum forbids the end token
        generator = self._generator(max_length=length, min_length=length)

        def prefill() -> None:
            self._append(generator, prompt)
            generator.generate_next_token()

        seconds = time_steps(prefill, generator.generate_next_token, new_tokens)
        check_count(len(generator.get_sequence(0)) - len(prompt), new_tokens)
        return seconds

    def logits(self, tokens: list[int], step: int) -> Logits:
        generator = self._generator(max_length=len(tokens) + 1)
        for start in range(0, len(tokens), step):
            self._append(generator, tokens[start : start + step])
            yield generator.get_output("logits")[0]

    def matrix_bytes(self) -> dict[str, int]:
        return dict.fromkeys(PHASES, graph_bytes(self.args.model / "model.onnx"))

    def _generator(self, **lengths: int) -> Any:
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, **lengths)
        return self._library.Generator(self._model, parameters)

    @staticmethod
    def _append(generator: Any, tokens: list[int]) -> None:
        import numpy as np

        generator.append_tokens(np.array(tokens, np.int32))


RUNNERS: dict[str, type[System]] = {"llmc": Llmc, "llamacpp": LlamaCpp, "openvino": OpenVino, "genai": Genai}


def prompt_ids(length: int, salt: int) -> list[int]:
    """Token ids of a prompt, the same for every system.

    ``salt`` is the number of the call in its process: it changes the first token, so that no prefix cache helps.
    """
    return [i % 10_000 + 10 + salt for i in range(length)]


def lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options about prompts and new tokens, shared by runners.py and peers.py."""
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate after each prompt, at least 2")
    parser.add_argument("--warm-up", type=int, help="longest untimed prompt, in tokens; default: as the timed one")
    parser.add_argument("--together", type=int, nargs="+", help="requests at once, instead of one after another")
    parser.add_argument("--image", type=int, nargs=2, help="width and height of a picture to answer with one token")


def one_by_one(system: System, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second for every prompt length, each after an untimed call; decode excludes the first new token."""
    prefill, decode = {}, {}
    for i, length in enumerate(args.prompts):
        system.generate(prompt_ids(min(length, args.warm_up or length), 2 * i), WARM_UP_TOKENS)
        system.settle()
        ttft_s, decode_s = system.generate(prompt_ids(length, 2 * i + 1), args.new_tokens)
        prefill[f"prefill {length}"] = length / ttft_s
        decode[f"decode after {length}"] = (args.new_tokens - 1) / decode_s
    return prefill | decode


def all_together(system: System, args: argparse.Namespace) -> dict[str, float]:
    """New tokens per second of all requests together, by their number, after an untimed call with as many."""
    length, speeds = args.prompts[0], {}
    for i, count in enumerate(args.together):
        salts = [2 * (1000 * i + number) for number in range(count)]
        system.together([prompt_ids(length, salt) for salt in salts], WARM_UP_TOKENS)
        system.settle()
        seconds = system.together([prompt_ids(length, salt + 1) for salt in salts], args.new_tokens)
        speeds[f"{count} at once"] = count * args.new_tokens / seconds
    return speeds


def after_image(system: System, args: argparse.Namespace) -> dict[str, float]:
    """Seconds from a picture to the first token, after an untimed one of the same size; and tokens of the prompt."""
    import numpy as np

    width, height = args.image
    pictures = np.random.default_rng(0).integers(256, size=(2, height, width, 3), dtype=np.uint8)
    system.look(pictures[0])
    seconds, tokens = system.look(pictures[1])
    return {f"s after an image of {width} x {height}": seconds, "tokens": tokens}


def first_token(kind: type[System], args: argparse.Namespace) -> dict[str, float]:
    """Seconds to open the system and to the first token after a prompt; and 10^6 bytes read from the disk."""
    for module in kind.modules:
        importlib.import_module(module)
    started = time.perf_counter()
    kind(args).generate(prompt_ids(args.prompts[0], 0), 1)
    seconds = time.perf_counter() - started
    read = Path("/proc/self/io").read_text(encoding="ascii").split("\nread_bytes:")[1].split()[0]
    return {"s": seconds, "MB read": int(read) // 10**6}


def write_logits(args: argparse.Namespace) -> dict[str, float]:
    """Write logits to prefill.npy (a window at once) and decode.npy (token by token): float32 [windows, length, V],
    like reference.npy for the windows in windows.npy. Returns the bytes of matrices by phase."""
    import numpy as np

    windows = np.load(args.logits / "windows.npy").tolist()
    shape = np.load(args.logits / "reference.npy", mmap_mode="r").shape
    args.prompts = [length] = [len(windows[0])]
    system = RUNNERS[args.system](args)
    for phase, step in zip(PHASES, (length, 1), strict=True):
        output = np.lib.format.open_memmap(args.logits / f"{phase}.npy", "w+", np.float32, shape)
        for row, tokens in zip(output, windows, strict=True):
            for i, part in enumerate(system.logits(tokens, step)):
                row[i * step : i * step + len(part)] = part
    return dict(system.matrix_bytes())


def sizes(model: Path) -> dict[str, float]:
    """10^6 bytes of the model's files, and of the process's peak resident memory, mapped weights included."""
    files = [model] if model.is_file() else [file for file in model.rglob("*") if file.is_file()]
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # ru_maxrss would include the parent's memory
    peak = 1024 * int(status.split("\nVmHWM:")[1].split()[0])
    return {"MB on disk": sum(file.stat().st_size for file in files) // 10**6, "MB at the peak": peak // 10**6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=RUNNERS)
    parser.add_argument("model", type=Path, help="what the system loads: a bundle, an exported folder, a GGUF file")
    parser.add_argument("--threads", type=int, required=True, help="CPUs the process may use")
    parser.add_argument("--first", action="store_true", help="the time until the first token, opening included")
    parser.add_argument("--logits", type=Path, help="folder with windows.npy, where logits go")
    lengths(parser)
    args = parser.parse_args()
    kind = RUNNERS[args.system]
    if args.logits:
        results = write_logits(args)
    elif args.first:
        results = first_token(kind, args)
    elif args.image:
        results = after_image(kind(args), args)
    elif args.together:
        results = all_together(kind(args), args)
    else:
        results = {**one_by_one(kind(args), args), **sizes(args.model)}
    print(json.dumps({name: float(f"{figure:.5g}") for name, figure in results.items()}), flush=True)


if __name__ == "__main__":
    main()
