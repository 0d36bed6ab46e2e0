"""The commands of `snapkv snapshots`, for whoever answers for what the stores hold."""

from typing import Annotated

import typer

from app.cli.generate import CommandError
from app.integrations.aws.secrets import SecretReader
from app.integrations.snapshot_tiers import open_snapshot_tiers
from app.settings import load_settings
from snapkv_core import StoreError, check_namespace

snapshots_app = typer.Typer(help="Snapshots of prompts in the stores.", no_args_is_help=True)


@snapshots_app.callback()
def snapshots() -> None:
    """Snapshots of prompts in the stores."""


@snapshots_app.command()
def delete(
    namespace: Annotated[str, typer.Argument(help="Tenant whose snapshots are removed.")],
) -> None:
    """Remove all snapshots of a tenant from Valkey and S3, as the settings name them."""
    check_namespace(namespace)
    settings = load_settings(read_secret=SecretReader().read)
    in_network = settings.model_copy(update={"snapshot_memory_bytes": 0})
    store = open_snapshot_tiers(in_network, _tell)
    if store is None:
        raise CommandError(
            "the settings name no store over a network (SNAPKV_SNAPSHOT_VALKEY_URL, "
            "SNAPKV_SNAPSHOT_S3_URL)"
        )
    try:
        num_removed = store.delete_namespace(namespace)
    finally:
        store.close()
    typer.echo(f"removed {num_removed} copies of snapshots of {namespace}")


def _tell(store: str, error: StoreError) -> None:
    typer.echo(f"{store}: {error.reason}", err=True)
