"""What a waiting call shows, in a terminal and in a notebook."""

from __future__ import annotations

import importlib.util

import pytest
import rich.console

from tmm_core.tuning import progress


def waited(shown: bool | None) -> None:
    with progress.Progress("64×64×64", shown) as bar:
        bar.total(3)
        bar.advance()
        if shown is not False:
            bar._timer.join()


@pytest.mark.parametrize(("shown", "seen"), [(True, True), (None, False), (False, False)])
def test_a_bar_goes_to_stderr_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shown: bool | None,
    seen: bool,
) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.01)
    waited(shown)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("tuning 64×64×64" in err) == seen


def test_a_notebook_without_widgets_gets_a_line_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.01)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else real(name)
    )
    waited(None)  # rich's own bar warns, and a warning is an error here
    assert "tuning 64×64×64" in capsys.readouterr().err
