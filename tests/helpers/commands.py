"""What a command of examples says when it is used wrongly."""

from collections.abc import Callable, Sequence

import pytest

from examples.gpt import cli


def complaint(
    main: Callable[..., object],
    argv: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Its one line on stderr, with exit code 2 and nothing on stdout."""
    monkeypatch.setattr("sys.argv", ["command", *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        cli.run(main)
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ") and len(printed.err.splitlines()) == 1
    return printed.err
