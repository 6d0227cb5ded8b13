"""Prompts that are stored: files of several formats and Hugging Face data sets, read in parallel.

`source` has what all of them have in common, `files` and `hub` say where they lie, `parsers` reads the formats of
files, `columns` says which cells of a row are its prompt and its answer. Left out: generated prompts
(rlx.data.reasoning_gym).

Example:
    from rlx.config.sections.data import DataConfig
    from rlx.data.stored.files import FileSource

    data = DataConfig(source="prompts.jsonl", params={}, prompt_column="messages")
    first = FileSource().first_rows(data, count=3)  # {question, answer, messages} each
"""
