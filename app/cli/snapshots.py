"""The commands of `snapkv snapshots`, for whoever answers for what the stores hold."""

from typing import Annotated

import typer

from app.cli.generate import CommandError
from app.integrations.aws.secrets import SecretReader
from app.integrations.snapshot_tiers import open_snapshot_tiers
from app.services.access import namespace_of
from app.setting_groups.access import KEY_NAME
from app.settings import load_settings
from snapkv_core import StoreError

snapshots_app = typer.Typer(help="Snapshots of prompts in the stores.", no_args_is_help=True)


@snapshots_app.callback()
def snapshots() -> None:
    """Snapshots of prompts in the stores."""


@snapshots_app.command()
def delete(
    caller: Annotated[
        str, typer.Argument(help="Name of the key whose snapshots are removed, or `default`.")
    ],
) -> None:
    """Remove all snapshots of a caller from Valkey and S3, as the settings name them."""
    if KEY_NAME.fullmatch(caller) is None:
        raise CommandError(f"{caller!r:.80} can be no name of a key")
    settings = load_settings(read_secret=SecretReader().read)
    in_network = settings.model_copy(update={"snapshot_memory_bytes": 0})
    store = open_snapshot_tiers(in_network, _tell)
    if store is None:
        raise CommandError(
            "the settings name no store over a network (SNAPKV_SNAPSHOT_VALKEY_URL, "
            "SNAPKV_SNAPSHOT_S3_URL)"
        )
    try:
        num_removed = store.delete_namespace(namespace_of(caller))
    finally:
        store.close()
    typer.echo(f"removed {num_removed} copies of snapshots of {caller}")


def _tell(store: str, error: StoreError) -> None:
    typer.echo(f"{store}: {error.reason}", err=True)
