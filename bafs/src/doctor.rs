//! `bafs doctor`: what this machine, and if it is named a cluster, has, lacks, and has left over.
//! What is looked at, and how it is mended without hanging, is in `bafs-client`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use bafs_client::doctor::{Treatment, check_identity, check_mounts, check_store};
use bafs_client::sandbox::{Check, Standing, check};
use bafs_proto::message::{Advert, DeleteVolume, ReadCounters};
use bafs_proto::volume::{VolumeState, VolumeStatus};
use bafs_server::clock;
use bafs_server::home::{UnfinishedUpload, list_unfinished_uploads};

use crate::args::DoctorArgs;
use crate::client::{Client, is_of_a_node};
use crate::output::Output;

/// Exit codes: jobs cannot run; something is left that `--repair` may mend.
const MISSING: u8 = 1;
const BROKEN: u8 = 3;

/// Time for one server to answer, in milliseconds.
const ANSWER_MS: u64 = 3_000;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 3_600_000;

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs, output: Output) -> Result<ExitCode> {
    let treatment = if args.repair {
        Treatment::Repair
    } else {
        Treatment::Look
    };
    let mut checks = check();
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
            checks.extend(look_at_cluster(identity, catalog, treatment)?);
        }
    }
    show(&checks, output)?;
    let any = |standing| checks.iter().any(|check| check.standing == standing);
    Ok(match (any(Standing::Missing), any(Standing::Broken)) {
        (true, _) => ExitCode::from(MISSING),
        (false, true) => ExitCode::from(BROKEN),
        (false, false) => ExitCode::SUCCESS,
    })
}

fn look_at_cluster(identity: &Path, catalog: &str, treatment: Treatment) -> Result<Vec<Check>> {
    if is_of_a_node(identity) {
        // Nodes are started with a catalog, and have nobody who may ask it.
        let found = format!(
            "the catalog at {catalog} was not looked at, as {} has neither `scheduler` nor an \
             identity of `bafs grant`",
            identity.display()
        );
        return Ok(vec![told("cluster", Standing::Fine, found, "")]);
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let looked = runtime.block_on(async {
        let client = Client::with(identity, catalog)?;
        Ok::<_, anyhow::Error>(check_cluster(&client, treatment).await)
    });
    runtime.shutdown_background();
    Ok(looked.unwrap_or_else(|error| {
        let remedy = "check --identity, --catalog, and that the catalog runs";
        let found = format!("{error:#}");
        vec![told("cluster", Standing::Broken, found, remedy)]
    }))
}

fn show(checks: &[Check], output: Output) -> Result<()> {
    for check in checks {
        let mark = match check.standing {
            Standing::Fine => "ok      ",
            Standing::Lacking => "lacking ",
            Standing::Missing => "MISSING ",
            Standing::Broken => "BROKEN  ",
            Standing::Repaired => "repaired",
        };
        output.remark(&format!("{mark} {}: {}", check.subject, check.found))?;
        if !check.remedy.is_empty() {
            output.remark(&format!("         to do: {}", check.remedy))?;
        }
    }
    if output.is_json() {
        output.say("", &checks)?;
    }
    Ok(())
}

async fn check_cluster(client: &Client, treatment: Treatment) -> Vec<Check> {
    let servers = match client.servers(None).await {
        Ok(servers) => servers,
        Err(error) => {
            let remedy = "start `bafs catalog`, or check --catalog and --identity";
            return vec![told(
                "catalog",
                Standing::Broken,
                format!("{error:#}"),
                remedy,
            )];
        }
    };
    let found = format!("it lists {} servers", servers.len());
    let mut checks = vec![told("catalog", Standing::Fine, found, "")];
    for server in &servers {
        let subject = format!("server {} at {}", server.name, server.address);
        let asked = client.call_within(&server.address, ReadCounters, ANSWER_MS);
        checks.push(match asked.await {
            Ok(_) => told(subject, Standing::Fine, "answers", ""),
            Err(error) => {
                let remedy = "is it stopped, and are its UDP and TCP ports open from here?";
                told(subject, Standing::Broken, format!("{error:#}"), remedy)
            }
        });
    }
    let (volumes, _) = client.volumes().await.unwrap_or_default();
    for (node, volume) in &volumes {
        checks.extend(check_volume(client, node, volume, treatment).await);
    }
    checks
}

/// A volume that nobody can or does use; nothing to say about any other.
async fn check_volume(
    client: &Client,
    node: &Advert,
    volume: &VolumeStatus,
    treatment: Treatment,
) -> Option<Check> {
    let id = volume.spec.id;
    let subject = format!("volume {} ({id}) on {}", volume.spec.name, node.name);
    if volume.state == VolumeState::Failed {
        let call = DeleteVolume { volume: id };
        if treatment == Treatment::Repair && client.call(&node.address, call).await.is_ok() {
            return Some(told(
                subject,
                Standing::Repaired,
                "it had failed; deleted",
                "",
            ));
        }
        let why = volume.fault.as_ref().map(ToString::to_string);
        let found = format!("it could not be made: {}", why.unwrap_or_default());
        return Some(told(
            subject,
            Standing::Broken,
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
        "nobody has shown interest for {silent_h} h; it is deleted in {} h",
        left_ms / HOUR_MS
    );
    let remedy = format!("to have its space now: bafs volume delete {id}");
    Some(told(subject, Standing::Lacking, found, remedy))
}

/// What unfinished uploads hold in the directory that a home exports.
fn check_export(export: &Path, treatment: Treatment) -> Vec<Check> {
    let subject = format!("export {}", export.display());
    let uploads = match list_unfinished_uploads(export) {
        Ok(uploads) => uploads,
        Err(error) => {
            let remedy = "name the directory that `bafs home --export` names";
            return vec![told(subject, Standing::Broken, error.to_string(), remedy)];
        }
    };
    let bytes: u64 = uploads.iter().map(|upload| upload.bytes).sum();
    let found = format!("{} unfinished uploads hold {bytes} bytes", uploads.len());
    let checks = uploads.iter().map(|upload| check_upload(upload, treatment));
    let whole = told(subject, Standing::Fine, found, "");
    std::iter::once(whole).chain(checks).collect()
}

fn check_upload(upload: &UnfinishedUpload, treatment: Treatment) -> Check {
    let subject = format!("upload to '{}'", upload.target);
    let found = format!(
        "{} bytes of it are in {}; the last came {} min ago",
        upload.bytes,
        upload.directory.display(),
        upload.idle_ms / MINUTE_MS
    );
    if !upload.is_stale() {
        return told(subject, Standing::Fine, found, "");
    }
    if treatment == Treatment::Repair && upload.remove().is_ok() {
        return told(subject, Standing::Repaired, format!("{found}; removed"), "");
    }
    let remedy = "if nobody sends it any more: bafs doctor --export DIR --repair; it is removed \
                  after 7 days, and earlier when the disk is full";
    told(subject, Standing::Lacking, found, remedy)
}

fn told(
    subject: impl Into<String>,
    standing: Standing,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Check {
    Check {
        subject: subject.into().into(),
        standing,
        found: found.into(),
        remedy: remedy.into(),
    }
}
