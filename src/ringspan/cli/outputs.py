"""Where a command is asked to write, checked before the minutes after which it would."""

from pathlib import Path


def check_picture(picture: Path, *endings: str) -> None:
    """Refuse what could not be written.

    Raises:
        ConfigError: another ending than those that can be drawn, or a folder that is not there.
    """
    from ringspan.core.errors import ConfigError

    if picture.suffix not in endings:
        *others, last = endings
        shown = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"--picture {picture}: end the name in {shown}")
    if not picture.parent.is_dir():
        raise ConfigError(f"--picture {picture}: there is no folder {picture.parent}")
    if picture.is_dir():
        raise ConfigError(f"--picture {picture}: is a folder; give the name of a file in it")
    check_folder("--picture", picture.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise a ConfigError where nothing could be written into a folder, which is made where it is not there."""
    from ringspan.core.errors import ConfigError
    from ringspan.core.files.named import why_no_folder

    if reason := why_no_folder(folder):
        raise ConfigError(f"{option} {folder}: cannot be written into ({reason}); choose another folder")
