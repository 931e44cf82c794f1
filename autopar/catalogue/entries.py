"""The catalogue's data files: one TOML file a family, in `architectures/`. No torch here: listing is instant."""

from __future__ import annotations

import difflib
import functools
import json
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from autopar.errors import UserError

InputKind = Literal["causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "speech-seq2seq"]
"""What a model of this kind is called with; `inputs.py` builds each."""


TINY = "-tiny"
"""NAME-tiny is the tiny config of NAME's architecture."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of a family, as its file has it. `seq` is 0 for images. `parameters` counts tied ones once."""

    name: str
    parameters: int
    global_batch: int
    source: str
    config: dict[str, Any]
    seq: int = 0


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """One file: `model_type` and `class` as transformers names them, `tiny` the config for verifying on CPU ranks."""

    model_type: str
    class_: str
    inputs: InputKind
    tiny: dict[str, Any]
    models: list[Row]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture of the catalogue: a row with its family."""

    row: Row
    family: Family

    @property
    def name(self) -> str:
        """The name that `autopar search` takes."""
        return self.row.name

    def summary(self) -> dict[str, Any]:
        """What `autopar models` shows."""
        row = self.row
        return {
            "name": row.name,
            "parameters": row.parameters,
            "class": self.family.class_,
            "seq": row.seq,
            "global_batch": row.global_batch,
            "source": row.source,
        }


@functools.cache
def entries() -> dict[str, Entry]:
    """Every architecture by name, families in order of file name."""
    folder = resources.files("autopar.catalogue") / "architectures"
    found: dict[str, Entry] = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        family = msgspec.convert(tomllib.loads(file.read_text("utf-8")), Family)
        found |= {row.name: Entry(row=row, family=family) for row in family.models}
    return found


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """What MODEL on the command line turned out to be: an entry (or its tiny config), a config file, or a factory."""

    entry: Entry | None = None
    tiny: bool = False
    config: Path | None = None
    factory: tuple[str, str] | None = None


def resolve(model: str) -> Named:
    """What `model` names: an entry, a Hugging Face config file or folder, or `package.module:factory`.

    Raises UserError with the closest names. Looks at the file system, imports nothing.
    """
    if model in entries():
        return Named(entry=entries()[model])
    if model.removesuffix(TINY) in entries():
        return Named(entry=entries()[model.removesuffix(TINY)], tiny=True)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UserError(f"model {model}: the folder has no config.json")
    if path.is_file():
        return Named(config=path)
    if os.sep in model or model.endswith(".json"):
        raise UserError(f"model {model}: no such file or folder")
    module, colon, attribute = model.partition(":")
    if colon:
        if not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise UserError(f"model {model!r}: wanted package.module:factory")
        return Named(factory=(module, attribute))
    raise UserError(_unknown(model))


def read_config(path: Path) -> dict[str, Any]:
    """What a Hugging Face config file holds, `model_type` among it. UserError where it can't be read."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"model {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"model {path}: malformed JSON ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise UserError(f"model {path}: no model_type in it; wanted a Hugging Face config.json")
    return data


def _unknown(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), entries(), n=3, cutoff=0.4)
    hint = f"closest: {', '.join(near)}" if near else "see `autopar models`"
    return f"unknown model {model!r}; {hint}; or a config.json, a model folder, or package.module:factory"
