"""The recipes of docs/recipes.md run over a daemon: what it keeps is what each function gives by hand."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from loader import open_dataset
from testbed import ROOT
from testbed.node import Daemon
from tests.loader.prepare.pictures import same

PAGE = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = [part.partition("\n") for part in PAGE.split("\n## ")[1:]]
RECIPES = {name: text.partition("```python\n")[2].partition("```\n")[0] for name, _, text in SECTIONS}
NEEDED = {
    "Tokens of a text": ["tokenizers"],
    "Sounds at one rate": ["soundfile", "scipy"],
    "Features of a frozen encoder": ["transformers"],
    "Frames of a video": ["av"],
}
"""The packages of each recipe."""
EACH, ENCODER = 6, "facebook/dinov2-small"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A daemon, a working directory with a tokenizer, and the data of all recipes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CACHESVC", "require")
    for name in ("speech", "pets", "clips"):
        for kind in ("a", "b"):
            (tmp_path / name / kind).mkdir(parents=True)
    (tmp_path / "text").mkdir()
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", str(tmp_path)]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        yield tmp_path


def write_texts(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0} | {str(n): n for n in range(1, 99)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    lines = (
        f'{{"text": "{" ".join(map(str, range(length)))}", "id": {length}}}' for length in range(3 * EACH)
    )
    (folder / "text" / "a.jsonl").write_text("\n".join(lines) + "\n")


def write_sounds(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(2 * EACH):
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setnchannels(1 + number % 2)
            sound.setsampwidth(2)
            sound.setframerate((8_000, 22_050, 48_000)[number % 3])
            sound.writeframes(draw.integers(-999, 999, 2 * (900 + 100 * number), np.int16).tobytes())
        (folder / "speech" / "ab"[number % 2] / f"{number}.wav").write_bytes(file.getvalue())


def write_pictures(folder: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    small = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=224)
    Dinov2Model(small).save_pretrained(folder / ENCODER)
    draw = np.random.default_rng(0)
    for number in range(2 * EACH):
        image = Image.fromarray(draw.integers(0, 255, (20 + number, 30, 3), np.uint8))
        image.save(folder / "pets" / "ab"[number % 2] / f"{number}.png")


def write_clips(folder: Path) -> None:
    import av

    draw = np.random.default_rng(0)
    for number in range(2 * EACH):
        path = folder / "clips" / "ab"[number % 2] / f"{number}.mp4"
        with av.open(str(path), "w") as video:
            stream = video.add_stream("mpeg4", rate=25)
            stream.width = stream.height = 64
            for _ in range(5 + 7 * number):
                frame = av.VideoFrame.from_ndarray(
                    draw.integers(0, 255, (64, 64, 3), np.uint8), format="rgb24"
                )
                video.mux(stream.encode(frame))
            video.mux(stream.encode())


WRITERS = dict(zip(NEEDED, (write_texts, write_sounds, write_pictures, write_clips), strict=True))


def recipe(name: str, folder: Path) -> ModuleType:
    """Import the script of a recipe over the folder, with a small encoder that is not trained."""
    code = RECIPES[name].replace("s3://bucket", str(folder)).replace(ENCODER, str(folder / ENCODER))
    (folder / "recipe.py").write_text(code)
    sys.modules.pop("recipe", None)
    importlib.invalidate_caches()
    return importlib.import_module("recipe")


def test_every_section_has_a_recipe() -> None:
    assert list(RECIPES) == list(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_a_recipe_keeps_what_its_function_gives_by_hand(name: str, folder: Path) -> None:
    for package in NEEDED[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package} here: `make compat` installs it")
    WRITERS[name](folder)
    module = recipe(name, folder)
    dataset, function = module.dataset, module.dataset.sample_spec.prepare
    plain = open_dataset(dataset.opened.link.uris[0], fields=dataset.sample_spec.fields and "text")
    by_hand = [function(plain[n]) for n in range(len(plain))]
    for _ in range(2):
        batches = [batch for batch in module.batches]
        assert len(batches) == -(-len(plain) // module.batches.batch_size)
        assert all(same(dataset[n], by_hand[n]) for n in range(len(plain)))
    assert module.batches.stats().bytes_by_origin["prepared"] == 0
