"""All settings of a run: their meaning, their rules, and how they are read from YAML files and dotted keys.

Left out: command-line options (rlx.cli.options), and whether files, models and GPUs exist. Neither torch nor Ray is
imported, so that a mistyped setting is refused in a fraction of a second.

Imports of rlx: none.

Example:
    from rlx.config import flatten, from_tree, with_overrides

    tree = {"algorithm": {"kl_coef": 0.02}}
    config = from_tree(with_overrides(tree, {"train.steps": 12, "data.params.max_digits": 2}))
    print(config.train.steps, config.algorithm.estimator.needs_critic, flatten(config)["data.params"])
"""

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten

__all__ = ["ConfigError", "RunConfig", "flatten", "from_tree", "read_yaml", "with_overrides"]
