"""What log-probabilities cost: PYTHONPATH=/tmp/site:$PWD python bench/head.py --gpu [--tokens 16384 65536]

Both passes of `token_logprobs` from hidden states and an output layer of Qwen2.5-0.5B's size in bfloat16, by
`score_logits`, by the same compiled, and by the Triton kernels, each with and without entropy. A row also names how
much was stored for the backward pass. Shown are milliseconds, the median of a few rounds, and the most memory beside
inputs and their gradients; the last column is the distance of the hidden states' gradient from that of the first way.
The floor is what the output layer's three products take alone. Left out: everything else of an update. Without --gpu
the sizes are too small to tell anything, and there are no kernels. It imports nothing of Ray.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from unittest import mock

import torch
from measure import Memory, now
from torch import Tensor, nn

from rlx.models import logprobs
from rlx.models.logprobs import LogitScorer, runs_kernels, score_logits, sixteenth_of_gpu, token_logprobs

ROW = "{:>7} {:>8} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9}"


@dataclass(frozen=True)
class Case:
    """An output layer, and what it is given."""

    head: nn.Linear
    hidden: Tensor  # [N, H]
    targets: Tensor  # [N]
    upstream: Tensor  # [N], the gradient in the log-probabilities; half of it is that in the entropies

    @staticmethod
    def of(tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Case:
        generator = torch.Generator(device).manual_seed(0)
        head = nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=torch.bfloat16)
        nn.init.normal_(head.weight, std=2.0 * hidden**-0.5, generator=generator)
        states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, generator=generator)
        targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
        upstream = torch.randn(tokens, device=device, generator=generator) / tokens
        return Case(head, states.requires_grad_(), targets, upstream)

    def both_passes(self, scorer: LogitScorer, entropy: bool, stored: int) -> Tensor:
        """The gradient in the hidden states, `[N, H]`."""
        self.head.weight.grad = self.hidden.grad = None
        chosen, spread = token_logprobs(self.head, self.hidden, self.targets, 0.9, entropy, scorer, stored)
        loss = (self.upstream * chosen).sum()
        (loss if spread is None else loss + 0.5 * (self.upstream * spread).sum()).backward()
        assert self.hidden.grad is not None
        return self.hidden.grad

    def products(self) -> Tensor:
        """The output layer's three products alone, 2^28 logits at a time; they share one block of logits."""
        size = max(1, 2**28 // self.head.out_features)
        with torch.no_grad():
            for states in self.hidden.split(size):
                logits = self.head(states)
                result = logits @ self.head.weight
                self.head.weight.grad = logits.t() @ states
        return result


def measured(device: torch.device, rounds: int, run: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    """Milliseconds of a round, the most memory in GiB beside what was there, and the last result."""
    run()  # compiles, and picks cuBLAS's algorithms
    memory = Memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory.forget()
    seconds = []
    for _ in range(rounds):
        started = now(device)
        result = run()
        seconds.append(now(device) - started)
    return 1000 * statistics.median(seconds), (memory.peak() - before) / 2**30, result.detach().float()


def measure(case: Case, device: torch.device, rounds: int, stored: Sequence[int]) -> None:
    """Prints the rows of a case."""
    milliseconds, *_ = measured(device, rounds, case.products)
    print(ROW.format(len(case.targets), "products", "", "", f"{milliseconds:.1f}", "", "", ""), flush=True)
    ways: dict[str, LogitScorer] = {"eager": score_logits, "compiled": torch.compile(score_logits)}
    if runs_kernels(device):
        ways["kernel"] = logprobs.kernel_scores
    for entropy, kept in product((False, True), stored):
        reference = None
        for name, scorer in ways.items():
            with mock.patch.object(logprobs, "runs_kernels", return_value=name == "kernel"):
                cells, reference = _cells(
                    case, device, rounds, partial(case.both_passes, scorer, entropy, kept), reference
                )
            print(ROW.format(len(case.targets), name, "yes" if entropy else "no", kept >> 20, *cells), flush=True)


def _cells(
    case: Case, device: torch.device, rounds: int, run: Callable[[], Tensor], reference: Tensor | None
) -> tuple[list[str], Tensor | None]:
    """The figures of a row, and the gradient `[N, H]` that later rows are compared with."""
    try:
        milliseconds, gib, gradient = measured(device, rounds, run)
    except torch.OutOfMemoryError:
        return ["no memory", "", "", ""], reference
    reference = gradient if reference is None else reference
    distance = (gradient - reference).norm() / reference.norm()
    rate = len(case.targets) / milliseconds / 1000
    return [f"{milliseconds:.1f}", f"{rate:.3f}", f"{gib:.2f}", f"{distance:.0e}"], reference


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What log-probabilities cost.", allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="on a GPU, with a vocabulary of 151936")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="16384 and 65536 on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if args.gpu else "cpu")
    hidden, vocabulary = (896, 151_936) if args.gpu else (64, 4096)
    stored = (0, 2 * sixteenth_of_gpu(1.0)) if args.gpu else (0, 2**20)
    name = torch.cuda.get_device_name() if args.gpu else "CPU"
    print(f"{name}, torch {torch.__version__}; H={hidden}, V={vocabulary}; stored: 2^20 float32 numbers")
    print(ROW.format("tokens", "way", "entropy", "stored", "ms", "Mtok/s", "peak GiB", "distance"))
    for tokens in args.tokens or ((16_384, 65_536) if args.gpu else (4096,)):
        measure(Case.of(tokens, hidden, vocabulary, device), device, args.rounds, stored)


if __name__ == "__main__":
    main()
