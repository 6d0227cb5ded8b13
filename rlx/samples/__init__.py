"""Every completion of a run: written beside training as parquet files, read again, and shown on one page.

    <run>/completions/step_000012-00000-of-00002.parquet       what one of two ranks trained on in step 12
    <run>/completions/held_out_000010-00000-of-00002.parquet   its answers in the evaluation after step 10

    <run>/evaluations/step_000010-held_out.parquet             which of its questions were answered right, and more

`columns` has what is kept of a completion, `token_texts` the text of each token, `writer` the thread that writes,
`reader` and `choosing` what is read again, `episodes` what steps need that are done again; `page` is one HTML file that
opens offline. `evaluations` writes and reads the outcomes of questions.

Left out: what a step computes (rlx.training) and the terminal (rlx.cli.samples).
Neither torch nor Ray is imported, so that reading is fast.

Imports of rlx: config, storage, types.

Example:
    from rlx.samples import reader
    from rlx.storage.addresses import open_storage

    run = open_storage("storage/runs/try1", create=False)
    for step in reader.kept_steps(run):
        print(step.kind, step.number, [row.score for row in reader.completions(reader.read(run, step))])
"""
