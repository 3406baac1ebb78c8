//! `bafs volume …` and `bafs servers`: the volume API by hand.

mod extract;
mod warm;

pub(crate) use warm::warm_volumes;

use std::time::Duration;

use anyhow::{Result, bail};
use bafs_proto::attributes::Constraint;
use bafs_proto::cache::GetCache;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::BLOCK_BYTES_DEFAULT;
use bafs_proto::message::{Advert, CreateVolume, DeleteVolume, InvalidateVolume, QueryServers};
use bafs_proto::token::Token;
use bafs_proto::volume::{
    LimitKind, ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec, VolumeState, VolumeStatus,
};
use serde_json::json;

use crate::args::{
    ClientArgs, LimitEnforcement, ServersArgs, UsageError, VolumeArgs, VolumeCommand,
    VolumeCreateArgs, VolumeReplicateArgs,
};
use crate::client::ClusterClient;
use crate::output::Printer;
use crate::units::parse_bytes;

const HOUR_MS: u64 = 3600 * 1000;

/// Files of a volume of which the command says nothing: one for so many bytes, and the least.
const BYTES_PER_FILE_DEFAULT: u64 = 16 << 10;
const FILES_DEFAULT_MIN: u64 = 10_000;

/// Time for calls that move the bytes of a volume, in milliseconds.
const TRANSFER_TIMEOUT_MS: u64 = 24 * HOUR_MS;

/// After so long it is said what a volume waits for.
const PROGRESS_NOTICE_DELAY: Duration = Duration::from_secs(5);

/// Runs a volume command.
pub(crate) async fn run_volume_command(command: VolumeCommand, output: Printer) -> Result<()> {
    match command {
        VolumeCommand::Create(args) => create_volume(args, output).await,
        VolumeCommand::List(args) => list_volumes(args, output).await,
        VolumeCommand::Show(args) => show_volume(args, output).await,
        VolumeCommand::Delete(args) => delete_volume(args, output).await,
        VolumeCommand::Replicate(args) => replicate_volume(args, output).await,
        VolumeCommand::Extract(args) => extract::extract_file(args, output).await,
        VolumeCommand::Invalidate(args) => invalidate_volume(args, output).await,
        VolumeCommand::Warm(args) => warm::warm_cache(args, output).await,
    }
}

async fn create_volume(args: VolumeCreateArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let node = client.find_node(&args.node).await?;
    let kind = match &args.cache {
        Some(url) => VolumeKind::Cache {
            source: client.resolve_source(url).await?,
            cooperative: args
                .cooperative
                .clone()
                .unwrap_or_else(|| args.name.clone()),
            replacement: ReplacementPolicy::default(),
            block_bytes: BLOCK_BYTES_DEFAULT,
        },
        None => VolumeKind::Scratch {
            fill: match &args.from {
                Some(url) => Some(client.resolve_source(url).await?),
                None => None,
            },
        },
    };
    let size_bytes = requested_size(&args)?;
    let by_size = match &kind {
        VolumeKind::Scratch { .. } => size_bytes / BYTES_PER_FILE_DEFAULT,
        VolumeKind::Cache { .. } => 0,
    };
    let size_files = args.files.unwrap_or_else(|| by_size.max(FILES_DEFAULT_MIN));
    let limit = match (&kind, args.limit) {
        (VolumeKind::Scratch { .. }, Some(LimitEnforcement::Watched)) => LimitKind::Watched,
        (VolumeKind::Scratch { .. }, None) => LimitKind::for_size(size_bytes, size_files),
        (VolumeKind::Cache { .. }, _) | (_, Some(LimitEnforcement::Exact)) => LimitKind::Exact,
    };
    let spec = VolumeSpec {
        id: VolumeId::random(),
        name: args.name.clone(),
        owner: owner_name(),
        kind,
        size_bytes,
        size_files,
        limit,
        lifetime_ms: args.lifetime_hours.saturating_mul(HOUR_MS),
    };
    let status = create_on_node(&client, &node, spec).await?;
    print_status(&node, &status, output)
}

fn requested_size(args: &VolumeCreateArgs) -> Result<u64> {
    match args.size.trim() {
        "0" => Ok(0),
        size => parse_bytes(size),
    }
    .and_then(|bytes| match bytes {
        0 => Err(UsageError::from_reason(
            "--size is 0 bytes; give a size such as 10GB",
        )),
        bytes => Ok(bytes),
    })
}

pub(crate) async fn create_on_node(
    client: &ClusterClient,
    node: &Advert,
    spec: VolumeSpec,
) -> Result<VolumeStatus> {
    let source_token = match &spec.kind {
        VolumeKind::Scratch { fill: None } => Token::none(),
        VolumeKind::Scratch { fill: Some(source) } | VolumeKind::Cache { source, .. } => {
            client.issue_source_token(source)?
        }
    };
    let call = CreateVolume {
        spec,
        server: Some(node.id),
        base: None,
        source_token,
    };
    let (volume, waits) = (call.spec.id, describe_wait(&call.spec.kind));
    let made = client.call_with_timeout(&node.address, call, TRANSFER_TIMEOUT_MS);
    tokio::pin!(made);
    let early = tokio::time::timeout(PROGRESS_NOTICE_DELAY, &mut made).await;
    let made = match (early, waits) {
        (Ok(made), _) => made,
        (Err(_), Some(waits)) => {
            eprintln!("node {} {waits} (volume {volume})", node.name);
            made.await
        }
        (Err(_), None) => made.await,
    };
    let status = made?;
    let Some(fault) = &status.error else {
        return Ok(status);
    };
    // Nobody can use it: it would only keep its space, and its name from the next one.
    let volume = status.spec.id;
    let mut deleted = client.call(&node.address, DeleteVolume { volume }).await;
    if deleted.is_err() {
        deleted = client.call(&node.address, DeleteVolume { volume }).await;
    }
    let left = match deleted {
        Ok(_) => String::new(),
        // A full disk cannot note that it is gone, which it is all the same.
        Err(_) if is_gone(client, node, volume).await => String::new(),
        Err(error) => format!("; its remains cannot be deleted ({error}): delete volume {volume}"),
    };
    bail!("cannot create volume {}: {fault}{left}", status.spec.name)
}

/// Whether a node knows a volume no more.
async fn is_gone(client: &ClusterClient, node: &Advert, volume: VolumeId) -> bool {
    let volumes = client.list_node_volumes(node).await;
    volumes.is_ok_and(|volumes| volumes.iter().all(|v| v.spec.id != volume))
}

/// What a volume waits for that is not made yet.
fn describe_wait(kind: &VolumeKind) -> Option<String> {
    match kind {
        VolumeKind::Cache {
            source: VolumeSource::Home { address, path, .. },
            ..
        } => Some(format!(
            "waits up to ten minutes for home {address} to list '{path}'; if the home or path is \
             wrong, delete the volume"
        )),
        VolumeKind::Scratch {
            fill: Some(VolumeSource::Home { address, path, .. }),
        } => Some(format!(
            "fills it with '{path}' of home {address}; fails after two minutes without an answer \
             (`bafs servers` lists live homes)"
        )),
        _ => None,
    }
}

async fn list_volumes(args: ClientArgs, output: Printer) -> Result<()> {
    let (volumes, silent) = ClusterClient::new(&args)?.list_volumes().await?;
    for node in silent {
        eprintln!("warning: cannot list the volumes of a node: {node}");
    }
    if output.is_json() {
        let all: Vec<_> = volumes
            .iter()
            .map(|(node, v)| status_json(node, v))
            .collect();
        return output.print_result("", &all);
    }
    output.print_remark(&format!(
        "{:<32}  {:<16} {:<10} {:<8} {:<9} {:>14} {:>14}",
        "ID", "NAME", "NODE", "KIND", "STATE", "USED BYTES", "SIZE BYTES"
    ))?;
    for (node, v) in volumes {
        output.print_remark(&format!(
            "{:<32}  {:<16} {:<10} {:<8} {:<9} {:>14} {:>14}",
            v.spec.id,
            v.spec.name,
            node.name,
            kind_name(&v.spec.kind),
            state_name(v.state),
            v.used_bytes,
            v.spec.size_bytes
        ))?;
    }
    Ok(())
}

async fn show_volume(args: VolumeArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let (mut texts, mut all) = (Vec::new(), Vec::new());
    for (node, status) in client.find_volumes(&args.volume).await? {
        let (text, described) = describe_volume(&client, &node, &status).await?;
        texts.push(text);
        all.push(described);
    }
    match all.as_slice() {
        [one] => output.print_result(&texts.join("\n"), one),
        several => output.print_result(&texts.join("\n"), &several),
    }
}

/// What is told of a volume, for people and for machines.
async fn describe_volume(
    client: &ClusterClient,
    node: &Advert,
    status: &VolumeStatus,
) -> Result<(String, serde_json::Value)> {
    let cache = match (&status.spec.kind, status.state) {
        (VolumeKind::Cache { .. }, VolumeState::Ready) => {
            let volume = status.spec.id;
            Some(client.call(&node.address, GetCache { volume }).await?)
        }
        // There is nothing to show of it yet.
        _ => None,
    };
    let mut described = status_json(node, status);
    let mut text = format_status(node, status);
    if status.state == VolumeState::Creating
        && let Some(waits) = describe_wait(&status.spec.kind)
    {
        text.push_str(&format!("\n  {waits}"));
        described["waiting_for"] = json!(waits);
    }
    if let Some(cache) = &cache {
        described["cache"] = warm::cache_json(cache);
        text.push_str(&warm::format_cache(cache));
    }
    Ok((text, described))
}

async fn delete_volume(args: VolumeArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    client
        .call(
            &node.address,
            DeleteVolume {
                volume: status.spec.id,
            },
        )
        .await?;
    output.print_result(
        &format!("deleted {} ({})", status.spec.name, status.spec.id),
        &json!({ "deleted": status.spec.id.to_string() }),
    )
}

async fn replicate_volume(args: VolumeReplicateArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let (holder, status) = client.find_volume(&args.volume).await?;
    let target = client.find_node(&args.to).await?;
    if !matches!(status.spec.kind, VolumeKind::Scratch { .. }) {
        bail!(
            "{} is a cache volume; create one on the other node instead",
            status.spec.name
        );
    }
    if holder.id == target.id {
        bail!(
            "{} is on {} already; name another node",
            status.spec.name,
            target.name
        );
    }
    let source = VolumeSource::Volume {
        address: holder.address,
        volume: status.spec.id,
    };
    let spec = VolumeSpec {
        id: VolumeId::random(),
        owner: owner_name(),
        kind: VolumeKind::Scratch { fill: Some(source) },
        ..status.spec
    };
    let copy = create_on_node(&client, &target, spec).await?;
    print_status(&target, &copy, output)
}

async fn invalidate_volume(args: VolumeArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let source_token = match &status.spec.kind {
        VolumeKind::Cache { source, .. } => client.issue_source_token(source)?,
        // The node says what is wrong with that.
        VolumeKind::Scratch { .. } => Token::none(),
    };
    let call = InvalidateVolume {
        volume: status.spec.id,
        source_token,
    };
    let status = client.call(&node.address, call).await?;
    print_status(&node, &status, output)
}

/// `bafs servers`.
pub(crate) async fn print_servers(args: ServersArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let query = QueryServers {
        kind: None,
        constraint: Constraint(args.comparisons),
    };
    let servers = client.query_servers(query).await?;
    if output.is_json() {
        return output.print_result("", &servers);
    }
    output.print_remark(&format!(
        "{:<16} {:<6} {:<22} {:<10} {:>16} {:>16} {:>7}",
        "NAME", "KIND", "ADDRESS", "GROUP", "FREE BYTES", "CAPACITY", "JOBS"
    ))?;
    for s in servers {
        output.print_remark(&format!(
            "{:<16} {:<6} {:<22} {:<10} {:>16} {:>16} {:>7}{}",
            s.name,
            format!("{:?}", s.kind).to_lowercase(),
            s.address,
            s.group,
            s.free_bytes,
            s.capacity_bytes,
            format!("{}/{}", s.jobs, s.slots),
            if s.lifetime.is_draining {
                " drains"
            } else {
                ""
            }
        ))?;
    }
    Ok(())
}

fn print_status(node: &Advert, status: &VolumeStatus, output: Printer) -> Result<()> {
    output.print_result(&format_status(node, status), &status_json(node, status))
}

fn format_status(node: &Advert, status: &VolumeStatus) -> String {
    let kept = match status.state {
        // Its time begins when it is made.
        VolumeState::Creating => String::new(),
        VolumeState::Ready | VolumeState::Failed => {
            let until = status.expires.to_utc_text();
            format!("; kept until {until}, longer while it is in use")
        }
    };
    let mut text = format!(
        "{} {} on {}: {} volume, {}, {} of {} bytes and {} of {} files used{kept}{}",
        status.spec.id,
        status.spec.name,
        node.name,
        kind_name(&status.spec.kind),
        state_name(status.state),
        status.used_bytes,
        status.spec.size_bytes,
        status.used_files,
        status.spec.size_files,
        match &status.error {
            Some(fault) => format!("; {fault}"),
            None => String::new(),
        }
    );
    for warning in status.warnings.sentences(&status.spec.name) {
        text.push_str(&format!("\n  warning: {warning}"));
    }
    text
}

fn status_json(node: &Advert, status: &VolumeStatus) -> serde_json::Value {
    json!({
        "id": status.spec.id.to_string(),
        "name": status.spec.name,
        "owner": status.spec.owner,
        "node": node.name,
        "address": node.address,
        "kind": kind_name(&status.spec.kind),
        "state": status.state,
        "error": status.error.as_ref().map(|fault| fault.to_string()),
        "used_bytes": status.used_bytes,
        "size_bytes": status.spec.size_bytes,
        "used_files": status.used_files,
        "size_files": status.spec.size_files,
        "manifest": status.manifest.map(|digest| digest.to_string()),
        "warnings": status.warnings.warnings,
        "warnings_omitted": status.warnings.omitted_count,
        "expires": status.expires,
    })
}

fn state_name(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Creating => "creating",
        VolumeState::Ready => "ready",
        VolumeState::Failed => "failed",
    }
}

fn kind_name(kind: &VolumeKind) -> &'static str {
    match kind {
        VolumeKind::Scratch { .. } => "scratch",
        VolumeKind::Cache { .. } => "cache",
    }
}

pub(crate) fn owner_name() -> String {
    std::env::var("USER").unwrap_or_else(|_| format!("uid {}", nix::unistd::getuid()))
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::ServerId;
    use bafs_proto::message::{Lifetime, ServerKind};
    use bafs_proto::source_warning::SourceWarnings;
    use bafs_proto::time::Time;
    use clap::Parser;

    use super::*;
    use crate::args::Cli;
    use bafs_proto::attributes::Attributes;

    #[test]
    fn volume_description_names_its_expiry_time() {
        let node = Advert {
            id: ServerId::random(),
            kind: ServerKind::Node,
            name: "n1".to_owned(),
            address: String::new(),
            group: String::new(),
            ttl_ms: 1_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            attributes: Attributes::default(),
            lifetime: Lifetime::default(),
        };
        let mut status = VolumeStatus {
            spec: VolumeSpec {
                id: VolumeId::random(),
                name: "work".to_owned(),
                owner: owner_name(),
                kind: VolumeKind::Scratch { fill: None },
                size_bytes: 1,
                size_files: 1,
                limit: LimitKind::Exact,
                lifetime_ms: HOUR_MS,
            },
            state: VolumeState::Ready,
            error: None,
            used_bytes: 0,
            used_files: 0,
            received_bytes: 0,
            manifest: None,
            warnings: SourceWarnings::default(),
            expires: Time(1_785_765_901_000),
        };
        let told = format_status(&node, &status);
        assert!(
            told.contains("kept until 2026-08-03 14:05:01 UTC"),
            "{told}"
        );
        status.state = VolumeState::Creating;
        let told = format_status(&node, &status);
        assert!(!told.contains("kept until"), "{told}");
    }

    #[test]
    fn volume_lifetime_must_be_within_bounds() {
        let understood = |hours: &str| {
            let words = [
                "bafs", "volume", "create", "v", "--node", "n1", "--size", "1MB",
            ];
            let more = [
                "--identity",
                "x",
                "--catalog",
                "y:1",
                "--lifetime-hours",
                hours,
            ];
            Cli::try_parse_from([&words[..], &more].concat()).is_ok()
        };
        assert!(understood("1") && understood("87600"));
        assert!(!understood("0") && !understood("87601"));
    }
}
