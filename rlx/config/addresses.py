"""What no address may hold: one check for all of them. A password, key or token would be kept with a run; and what no
file or server can be called ends in errors of whatever opens it.

For secrets it reads an address as some server may read it: escapes of escapes, backslashes, options after "?", "&", ";"
and "#", and addresses within options. Left out: keys that look like names, in a place that says nothing of a key.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from itertools import pairwise
from typing import Annotated, Any

import pydantic

from rlx.config.errors import EMPTY

_SECRET = re.compile(  # names of options
    r"passw|passcode|passphrase|secret|credential|signature|bearer|authorization|cookie|oauth|hmac|session_?id"
    r"|token$|(access|auth)_?tokens"
    r"|(access|account|api|app|auth|license|master|private|shared|subscription|user)[_-]?key"
    r"|(^|[^a-z])(auth|code|creds?|jwt|keys?|otp|pass|psw|pw|pwd|sas|session|sid|sig|tok|token)($|[^a-z])",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"ssl.*|sort_keys|num_keys|code_version")  # sslkey is the path of a file
_OPTION = re.compile(r"[?&;#,]\s*([^?&;#,=]+)=?([^?&;#,]*)")
_PASSWORD = re.compile(r"(?<!/)//[^@/]*:(?!\d+/)[^@]*@")  # it may have "/" in it; after a port, that begins a path
_USER = re.compile(r"([\w+.-]*):?(?<!/)//([^/?#@]*)(:[^@]*)?@")
_DATABASE = re.compile(r"sql|oracle", re.IGNORECASE)  # a lone user of theirs is a name, of other servers a token
_ISSUED = re.compile(  # how keys of services begin
    r"(AKIA|ASIA)[A-Z0-9]{16}|(?<![A-Za-z0-9])((sk-|hf_|gh[opsu]_|github_pat_|xox[abp]-)[A-Za-z0-9]{20}|dapi[0-9a-f]{32}"
    r"|(sk-(or-v1|ant|proj|svcacct)-|gsk_|xai-|glpat-|nvapi-|r8_|npm_|dop_v1_|lsv2_[a-z]{2}_|AIza|SG\.)[\w.-]{20})"
)
_LONG = re.compile(r"[A-Za-z0-9]{20,}")
_DRAWN = 0.4  # share of neighbours of different kinds (small, capital, digit): of drawn characters 0.6, of words 0.2
_LAYERS = 3  # of escapes
_INSTEAD = {
    "uri": "use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the database's own variable, such as "
    "PGPASSWORD",
    "url": "use reward.url_key_env",
    "judge_url": "use reward.judge_url_key_env",
}


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, on Linux
_WILDCARD = re.compile(rb"[*?[]")  # of a pattern, which may be longer than the names that match it


def why_unusable(address: str) -> str:
    """Why nothing can have this address or path; empty if something may."""
    if "\0" in address:
        return "it has a null byte in it"
    try:
        path = address.encode()
    except UnicodeEncodeError:
        return "it is no text in UTF-8"
    if "://" in address and not address.startswith(("file:", "sqlite:")):
        return ""
    if address.startswith("sqlite:"):
        path = path.partition(b"?")[0]  # options of the database follow
    if _WILDCARD.search(path):
        return ""
    if len(path) > _LONGEST_PATH:
        return f"a path has {_LONGEST_PATH} bytes at most, and this one {len(path)}"
    longest = max(map(len, path.split(b"/")))
    return f"a file's name has {_LONGEST_NAME} bytes at most, and one here {longest}" if longest > _LONGEST_NAME else ""


def refuse_empty(text: str) -> str:
    """Returns a text; raises ValueError for an empty one."""
    if not text:
        raise ValueError(EMPTY)
    return text


def _refuse_unusable(address: str) -> str:
    if reason := why_unusable(address):
        raise ValueError(reason)
    return address


def _refuse_secret(address: str, info: pydantic.ValidationInfo) -> str:
    if holds_secret(address):
        instead = _INSTEAD.get(info.field_name or "", "put it into the environment (AWS_SECRET_ACCESS_KEY, HF_TOKEN)")
        raise ValueError(f"contains a user, password, token or key, which would be saved with the run: {instead}")
    return address


Address = Annotated[
    str,
    pydantic.AfterValidator(_refuse_secret),
    pydantic.AfterValidator(refuse_empty),
    pydantic.AfterValidator(_refuse_unusable),
    pydantic.AfterValidator(os.path.expanduser),
]
"""a setting that takes an address, though it may also be a folder, which may begin with ~, or a name"""


def may_be_on_hub(path: str) -> bool:
    """Whether the path of a model that is not here may be its name on the Hugging Face hub."""
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1


def _refuse_key(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or _ISSUED.search(name):
        raise ValueError("expected the name of an environment variable that holds the key, e.g. MY_KEY")
    return name


VariableName = Annotated[str, pydantic.AfterValidator(_refuse_key)]
"""a setting that names an environment variable, and is not the key itself"""


def holds_secret(address: str) -> bool:
    """Whether an address has a password or token before its host, an option that is named like a secret or has an "@",
    or what looks like a key anywhere.

    Text that is no address holds none but what services issue. `postgresql://USER@host/db` holds none: it names a user.
    """
    text = re.sub(r"[\t\r\n]", "", address).replace("\\", "/")
    for _ in range(_LAYERS):
        text = urllib.parse.unquote(text)
    if _ISSUED.search(text):
        return True
    if "//" not in text:
        return False
    return (
        bool(_PASSWORD.search(text))
        or any(_is_secret_user(*user.groups()) for user in _USER.finditer(text))
        or any(names_secret(name) or "@" in value for name, value in _OPTION.findall(text))
        or any(map(_is_drawn, _LONG.findall(text)))
    )


def any_secret(value: Any) -> bool:
    """Whether any text in a value, as YAML gives it, is an address that holds a secret.

    Of a value that contains itself each part is looked at once.
    """
    left, seen = [value], set[int]()
    while left:
        part = left.pop()
        if isinstance(part, str) and holds_secret(part):
            return True
        if isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            left += [*part, *part.values()] if isinstance(part, dict) else part
    return False


def _is_secret_user(scheme: str, user: str, rest: str | None) -> bool:
    is_database = bool(_DATABASE.search(scheme))
    return (rest is not None and is_database) or (rest is None and (":" in user or not is_database))


def names_secret(option: str) -> bool:
    """Whether an option or a variable is called as what holds a secret is."""
    return bool(_SECRET.search(option)) and not _HARMLESS.fullmatch(option)


def _is_drawn(text: str) -> bool:
    """Whether letters and digits look as if chance had drawn them, as in a key; ids in small letters do not."""
    kinds = ["small" if each.islower() else "capital" if each.isupper() else "digit" for each in text]
    changes = sum(left != right for left, right in pairwise(kinds))
    return len(set(kinds)) == 3 and changes >= _DRAWN * (len(text) - 1)
