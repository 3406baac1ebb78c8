"""The executor, without a cluster."""

from __future__ import annotations

import asyncio

from snakemake_executor_plugin_bafs import Executor, address_towards, common_settings, positive


def test_status_checks_before_the_setup_do_nothing() -> None:
    # Snakemake starts the thread that checks before it calls __post_init__.
    executor = Executor.__new__(Executor)

    async def check() -> list[object]:
        return [info async for info in executor.check_active_jobs([])]

    assert asyncio.run(check()) == []


def test_jobs_need_no_shared_file_system() -> None:
    assert common_settings.non_local_exec and common_settings.implies_no_shared_fs
    assert common_settings.job_deploy_sources and common_settings.can_transfer_local_files


def test_resources_that_are_not_known_yet_are_ignored() -> None:
    assert positive({"disk_mb": 5}, "disk_mb") == 5
    assert positive({"disk_mb": "<TBD>"}, "disk_mb") is None
    assert positive({}, "disk_mb") is None


def test_the_listen_address_leads_to_the_catalog() -> None:
    assert address_towards("127.0.0.1:7000") == "127.0.0.1"
