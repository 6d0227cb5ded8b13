"""What each rank of a test would import and look up first, for the process from which the ranks are forked."""

import gc

import pytest  # noqa: F401
import shared  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import rlx.models.tiny
import rlx.runs.launch
import rlx.training.loop  # noqa: F401

get_checkpoint_conversion_mapping("llama")  # hundreds of patterns are compiled once
gc.collect()
gc.freeze()  # else each rank's first collection would copy the memory that it shares with the others
