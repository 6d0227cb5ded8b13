"""What the runs of a sweep prove: settings paired by seed and question, and what more seeds or questions would show.

`crossed` has the mean of a table of seeds and questions with its interval, `pairs` compares settings by it, `winner`
takes the luck off the best one, `flips` finds the questions whose answers changed, and `power` says what a plan can
show. `outcomes` reads what came of each question; `evidence` puts all of it together.

Left out: tests for stopping settings while a sweep runs (rlx.analysis.paired, rlx.sweeps.schedulers).

Example:
    import numpy as np
    from rlx.analysis.comparison.crossed import crossed_mean

    gaps = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])  # of two settings, on two seeds and three questions
    print(crossed_mean(gaps).value)
"""
