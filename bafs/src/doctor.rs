//! `bafs doctor`: what this machine, and if it is named a cluster, has, lacks, and has left over.
//! What is looked at, and how it is mended without hanging, is in `bafs-client`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use bafs_client::doctor::{RepairMode, check_identity, check_mounts, check_store};
use bafs_client::sandbox::{Check, CheckStatus, check_host};
use bafs_proto::message::{Advert, DeleteVolume, ReadCounters};
use bafs_proto::volume::{VolumeState, VolumeStatus};
use bafs_server::clock;
use bafs_server::executor::GroupLocation;
use bafs_server::home_server::{UnfinishedUpload, list_unfinished_uploads};

use crate::args::{DoctorArgs, UsageError};
use crate::client::{ClusterClient, is_node_identity};
use crate::output::Printer;

/// Exit codes: jobs cannot run; something is left that `--repair` may mend.
const EXIT_MISSING: u8 = 1;
const EXIT_BROKEN: u8 = 3;

/// Time for one server to answer, in milliseconds.
const CALL_TIMEOUT_MS: u64 = 3_000;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 3_600_000;

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs, output: Printer) -> Result<ExitCode> {
    let treatment = if args.repair {
        RepairMode::Repair
    } else {
        RepairMode::ReportOnly
    };
    if args.catalog.is_some() && args.identity.is_none() {
        return Err(UsageError::from_reason(
            "--catalog needs --identity, a directory that `bafs init` created",
        ));
    }
    let mut checks = check_host();
    checks.push(check_job_memory());
    checks.extend(check_mounts(treatment));
    if let Some(store) = &args.store {
        checks.extend(check_store(store, treatment));
    }
    if let Some(export) = &args.export {
        checks.extend(check_export(export, treatment));
    }
    if let Some(identity) = &args.identity {
        checks.extend(check_identity(identity, treatment));
        if let Some(catalog) = &args.catalog {
            checks.extend(examine_cluster(identity, catalog, treatment)?);
        }
    }
    print_checks(&checks, output)?;
    let any = |standing| checks.iter().any(|check| check.status == standing);
    Ok(
        match (any(CheckStatus::Missing), any(CheckStatus::Broken)) {
            (true, _) => ExitCode::from(EXIT_MISSING),
            (false, true) => ExitCode::from(EXIT_BROKEN),
            (false, false) => ExitCode::SUCCESS,
        },
    )
}

/// How a node that is started here holds jobs to their memory.
fn check_job_memory() -> Check {
    let subject = "memory of jobs";
    match GroupLocation::find() {
        Ok(location) => {
            let found = format!("held by control groups below {}", location.describe());
            new_check(subject, CheckStatus::Fine, found, "")
        }
        Err(obstacle) => {
            let found = format!("watched ten times a second by a node started here: {obstacle}");
            let remedy = "for control groups, start the node by systemd with Delegate=yes, as the \
                          unit bafs-node does";
            new_check(subject, CheckStatus::Degraded, found, remedy)
        }
    }
}

fn examine_cluster(identity: &Path, catalog: &str, treatment: RepairMode) -> Result<Vec<Check>> {
    if is_node_identity(identity) {
        // Nodes are started with a catalog, and have nobody who may ask it.
        let found = format!(
            "the catalog at {catalog} is not checked: {} has neither `scheduler` nor an identity \
             of `bafs grant`",
            identity.display()
        );
        return Ok(vec![new_check("cluster", CheckStatus::Fine, found, "")]);
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let looked = runtime.block_on(async {
        let client = ClusterClient::connect(identity, catalog)?;
        Ok::<_, anyhow::Error>(check_cluster(&client, treatment).await)
    });
    runtime.shutdown_background();
    Ok(looked.unwrap_or_else(|error| {
        let remedy = "check --identity, --catalog, and that the catalog runs";
        let found = format!("{error:#}");
        vec![new_check("cluster", CheckStatus::Broken, found, remedy)]
    }))
}

fn print_checks(checks: &[Check], output: Printer) -> Result<()> {
    for check in checks {
        let mark = match check.status {
            CheckStatus::Fine => "ok      ",
            CheckStatus::Degraded => "lacking ",
            CheckStatus::Missing => "MISSING ",
            CheckStatus::Broken => "BROKEN  ",
            CheckStatus::Repaired => "repaired",
        };
        output.print_remark(&format!("{mark} {}: {}", check.subject, check.found))?;
        if !check.remedy.is_empty() {
            output.print_remark(&format!("         to do: {}", check.remedy))?;
        }
    }
    if output.is_json() {
        output.print_result("", &checks)?;
    }
    Ok(())
}

async fn check_cluster(client: &ClusterClient, treatment: RepairMode) -> Vec<Check> {
    let servers = match client.list_servers(None).await {
        Ok(servers) => servers,
        Err(error) => {
            let remedy = "start `bafs catalog`, or check --catalog and --identity";
            return vec![new_check(
                "catalog",
                CheckStatus::Broken,
                format!("{error:#}"),
                remedy,
            )];
        }
    };
    let found = format!("it lists {} servers", servers.len());
    let mut checks = vec![new_check("catalog", CheckStatus::Fine, found, "")];
    for server in &servers {
        let subject = format!("server {} at {}", server.name, server.address);
        let asked = client.call_with_timeout(&server.address, ReadCounters, CALL_TIMEOUT_MS);
        checks.push(match asked.await {
            Ok(_) => new_check(subject, CheckStatus::Fine, "answers", ""),
            Err(error) => {
                let remedy = "check that it runs and that its UDP and TCP ports are open from here";
                new_check(subject, CheckStatus::Broken, format!("{error:#}"), remedy)
            }
        });
    }
    let (volumes, _) = client.list_volumes().await.unwrap_or_default();
    for (node, volume) in &volumes {
        checks.extend(check_volume(client, node, volume, treatment).await);
    }
    checks
}

/// A volume that nobody can or does use; nothing to say about any other.
async fn check_volume(
    client: &ClusterClient,
    node: &Advert,
    volume: &VolumeStatus,
    treatment: RepairMode,
) -> Option<Check> {
    let id = volume.spec.id;
    let subject = format!("volume {} ({id}) on {}", volume.spec.name, node.name);
    if volume.state == VolumeState::Failed {
        let call = DeleteVolume { volume: id };
        if treatment == RepairMode::Repair && client.call(&node.address, call).await.is_ok() {
            return Some(new_check(
                subject,
                CheckStatus::Repaired,
                "it had failed; deleted",
                "",
            ));
        }
        let why = volume.error.as_ref().map(ToString::to_string);
        let found = format!("its creation failed: {}", why.unwrap_or_default());
        return Some(new_check(
            subject,
            CheckStatus::Broken,
            found,
            "bafs doctor --repair",
        ));
    }
    let left_ms = volume.expires.ms_since(clock::now());
    if left_ms > volume.spec.lifetime_ms / 2 {
        return None;
    }
    let silent_h = volume.spec.lifetime_ms.saturating_sub(left_ms) / HOUR_MS;
    let found = format!(
        "unused for {silent_h} h; the node deletes it in {} h",
        left_ms / HOUR_MS
    );
    let remedy = format!("to free its space now: bafs volume delete {id}");
    Some(new_check(subject, CheckStatus::Degraded, found, remedy))
}

/// What unfinished uploads hold in the directory that a home exports.
fn check_export(export: &Path, treatment: RepairMode) -> Vec<Check> {
    let subject = format!("export {}", export.display());
    let uploads = match list_unfinished_uploads(export) {
        Ok(uploads) => uploads,
        Err(error) => {
            let remedy = "name the directory that `bafs home --export` names";
            return vec![new_check(
                subject,
                CheckStatus::Broken,
                error.to_string(),
                remedy,
            )];
        }
    };
    let bytes: u64 = uploads.iter().map(|upload| upload.bytes).sum();
    let found = format!("{} unfinished uploads hold {bytes} bytes", uploads.len());
    let checks = uploads.iter().map(|upload| check_upload(upload, treatment));
    let whole = new_check(subject, CheckStatus::Fine, found, "");
    std::iter::once(whole).chain(checks).collect()
}

fn check_upload(upload: &UnfinishedUpload, treatment: RepairMode) -> Check {
    let subject = format!("upload to '{}'", upload.target);
    let found = format!(
        "{} bytes of it are in {}; the last arrived {} min ago",
        upload.bytes,
        upload.file.display(),
        upload.idle_ms / MINUTE_MS
    );
    if !upload.is_stale() {
        return new_check(subject, CheckStatus::Fine, found, "");
    }
    if treatment == RepairMode::Repair && upload.remove().is_ok() {
        return new_check(
            subject,
            CheckStatus::Repaired,
            format!("{found}; removed"),
            "",
        );
    }
    let remedy = "if its sender is gone: bafs doctor --export DIR --repair; the home removes it \
                  after 7 days, or earlier when the disk is full";
    new_check(subject, CheckStatus::Degraded, found, remedy)
}

fn new_check(
    subject: impl Into<String>,
    standing: CheckStatus,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Check {
    Check {
        subject: subject.into().into(),
        status: standing,
        found: found.into(),
        remedy: remedy.into(),
    }
}
