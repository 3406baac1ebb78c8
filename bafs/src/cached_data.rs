//! `bafs cache`: cached data apart from runs. Data that no volume shows wait on the nodes for the
//! next run of the source, in space that nobody reserved. Pinned sources have a volume on each
//! node, which reserves their space, and whose data the runs share.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, bail};
use bafs_proto::cache::{DropRetainedData, ListRetainedData, Pinning, RetainedSource};
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::BLOCK_BYTES_DEFAULT;
use bafs_proto::message::{Advert, DeleteVolume, ServerKind};
use bafs_proto::volume::{
    LimitKind, ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec, VolumeStatus,
};
use bafs_sched::io::homes::HomePath;

use crate::args::{CacheCommand, CachePinArgs, CacheUnpinArgs};
use crate::client::ClusterClient;
use crate::output::Printer;
use crate::units::{format_bytes, parse_bytes};
use crate::volume::{create_on_node, owner_name, warm_volumes};

/// Name of the volumes that pin a source. They are found by it and by their source.
const PIN_NAME: &str = "pinned";

const HOUR_MS: u64 = 3600 * 1000;

/// Runs a command.
pub(crate) async fn run_cache_command(command: CacheCommand, output: Printer) -> Result<()> {
    match command {
        CacheCommand::List(args) => {
            let client = ClusterClient::new(&args)?;
            let mut found = Vec::new();
            for node in client.list_servers(Some(ServerKind::Node)).await? {
                let listed = client.call(&node.address, ListRetainedData).await;
                let listed = listed.with_context(|| format!("node {}", node.name))?;
                found.push((node, listed.data));
            }
            let (volumes, _) = client.list_volumes().await?;
            let pinned = volumes.iter().filter(|(_, volume)| is_pin(volume, None));
            print_data("no data without a volume", &found, pinned, output)
        }
        CacheCommand::Pin(args) => pin_source(&args, output).await,
        CacheCommand::Unpin(args) => unpin_source(&args, output).await,
        CacheCommand::Drop(args) => {
            let client = ClusterClient::new(&args.client)?;
            let mut dropped = Vec::new();
            for node in client.list_servers(Some(ServerKind::Node)).await? {
                let path = args.source.clone();
                let listed = client.call(&node.address, DropRetainedData { path }).await;
                let listed = listed.with_context(|| format!("node {}", node.name))?;
                dropped.push((node, listed.data));
            }
            print_data("nothing was removed", &dropped, [].iter(), output)
        }
    }
}

/// Reserves space for a source on nodes, and fetches it there.
async fn pin_source(args: &CachePinArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let source = client.resolve_source(&args.source).await?;
    let size_bytes = parse_bytes(&args.size).context("--size")?;
    let mut nodes = Vec::new();
    for node in &args.nodes {
        nodes.push(client.find_node(node).await?);
    }
    if args.nodes.is_empty() {
        nodes = client.list_servers(Some(ServerKind::Node)).await?;
    }
    let (volumes, _) = client.list_volumes().await?;
    let mut targets = Vec::new();
    for node in nodes {
        let is_here = |(at, volume): &&(Advert, VolumeStatus)| {
            at.id == node.id && is_pin(volume, Some(&source))
        };
        let known = volumes.iter().find(is_here);
        let volume = match known {
            Some((_, volume)) => volume.spec.id,
            None => {
                let spec = pin_spec(&source, (size_bytes, args.files), args.lifetime_hours)?;
                let id = spec.id;
                let made = create_on_node(&client, &node, spec).await;
                made.with_context(|| format!("node {}", node.name))?;
                id
            }
        };
        targets.push((node, volume));
    }
    if targets.is_empty() {
        bail!("there is no node that could keep the data; see `bafs servers`");
    }
    warm_volumes(&client, targets, ("", Pinning::Pin), true, output).await
}

/// Gives up the space of a pinned source. Its data stay until somebody wants their space.
async fn unpin_source(args: &CacheUnpinArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let source = client.resolve_source(&args.source).await?;
    let (volumes, silent) = client.list_volumes().await?;
    for node in silent {
        eprintln!("warning: a node does not say what it has pinned: {node}");
    }
    let pins = volumes
        .into_iter()
        .filter(|(_, volume)| is_pin(volume, Some(&source)));
    let pins: Vec<_> = pins.collect();
    if pins.is_empty() {
        bail!(
            "{} is pinned on no node; see `bafs cache list`",
            args.source
        );
    }
    let targets = pins.iter();
    let targets = targets.map(|(node, volume)| (node.clone(), volume.spec.id));
    warm_volumes(
        &client,
        targets.collect(),
        ("", Pinning::Unpin),
        false,
        output,
    )
    .await?;
    for (node, volume) in &pins {
        let volume = volume.spec.id;
        client.call(&node.address, DeleteVolume { volume }).await?;
    }
    Ok(())
}

/// The volume that pins a source on a node, with the blocks that runs use.
fn pin_spec(
    source: &VolumeSource,
    (size_bytes, size_files): (u64, u64),
    lifetime_hours: u64,
) -> Result<VolumeSpec> {
    let VolumeSource::Home { address, path, id } = source.clone() else {
        bail!("only sources at homes are cached");
    };
    let home = HomePath { address, path, id };
    Ok(VolumeSpec {
        id: VolumeId::random(),
        name: PIN_NAME.to_owned(),
        owner: owner_name(),
        kind: VolumeKind::Cache {
            source: source.clone(),
            cooperative: home.cooperative_name(),
            replacement: ReplacementPolicy::default(),
            block_bytes: BLOCK_BYTES_DEFAULT,
        },
        size_bytes,
        size_files,
        limit: LimitKind::Exact,
        lifetime_ms: lifetime_hours.saturating_mul(HOUR_MS),
    })
}

/// Whether a volume pins a source: this one, or any.
fn is_pin(volume: &VolumeStatus, wanted: Option<&VolumeSource>) -> bool {
    let VolumeKind::Cache { source, .. } = &volume.spec.kind else {
        return false;
    };
    volume.spec.name == PIN_NAME && wanted.is_none_or(|wanted| source == wanted)
}

/// A line for each source: its space on all nodes.
fn print_data<'p>(
    nothing: &str,
    found: &[(Advert, Vec<RetainedSource>)],
    pinned: impl Iterator<Item = &'p (Advert, VolumeStatus)>,
    output: Printer,
) -> Result<()> {
    let mut sources: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
    let mut rows = Vec::new();
    for (node, data) in found {
        for source in data {
            let sum = sources.entry((&source.address, &source.path)).or_default();
            *sum = (sum.0.saturating_add(source.bytes), sum.1 + 1);
            rows.push(serde_json::json!({
                "node": node.name,
                "home": source.address,
                "source": source.path,
                "bytes": source.bytes,
                "files": source.files,
                "used_at": source.used_at,
                "is_pinned": false,
            }));
        }
    }
    let mut pins: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
    for (node, volume) in pinned {
        let VolumeKind::Cache {
            source: VolumeSource::Home { address, path, .. },
            ..
        } = &volume.spec.kind
        else {
            continue;
        };
        let sum = pins.entry((address, path)).or_default();
        *sum = (sum.0.saturating_add(volume.spec.size_bytes), sum.1 + 1);
        rows.push(serde_json::json!({
            "node": node.name,
            "home": address,
            "source": path,
            "bytes": volume.used_bytes,
            "reserved_bytes": volume.spec.size_bytes,
            "files": volume.used_files,
            "is_pinned": true,
        }));
    }
    let mut text = String::new();
    for ((home, path), (bytes, parts)) in &pins {
        let bytes = format_bytes(u128::from(*bytes));
        let _ = writeln!(
            text,
            "{path}  pinned in {bytes} on {parts} nodes  (home {home})"
        );
    }
    for ((home, path), (bytes, parts)) in &sources {
        let bytes = format_bytes(u128::from(*bytes));
        let on = match parts {
            1 => "1 node".to_owned(),
            parts => format!("{parts} nodes"),
        };
        let _ = writeln!(text, "{path}  {bytes} on {on}  (home {home})");
    }
    let text = match text.is_empty() {
        true => nothing,
        false => text.trim_end(),
    };
    output.print_result(text, &rows)
}
