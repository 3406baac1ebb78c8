//! `bafs volume warm`, and what `bafs volume show` says of a cache volume.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Result, bail};
use bafs_proto::cache::{CacheStatus, Pinning, ShowCache, WarmCache, WarmState, Warming};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::Advert;
use bafs_proto::volume::{VolumeKind, VolumeStatus};
use serde_json::{Value, json};

use crate::args::VolumeWarmArgs;
use crate::client::Client;
use crate::output::Output;

/// How often it is asked how far a warming is.
const LOOK: Duration = Duration::from_secs(1);

/// Warms a cache volume on its node, or a cooperative one on all of its nodes.
pub(super) async fn warm(args: VolumeWarmArgs, output: Output) -> Result<()> {
    let client = Client::new(&args.client)?;
    let shares = shares(&client, &args.volume).await?;
    let pinning = match (args.pin, args.unpin) {
        (true, _) => Pinning::Pin,
        (_, true) => Pinning::Unpin,
        _ => Pinning::Leave,
    };
    let mut all = Vec::new();
    for (node, volume) in &shares {
        let call = WarmCache {
            volume: *volume,
            path: args.path.trim_matches('/').to_owned(),
            pinning,
        };
        all.push(client.call(&node.address, call).await?);
    }
    while args.wait && all.iter().any(|w| w.state == WarmState::Running) {
        if std::io::stderr().is_terminal() {
            let sum = |of: fn(&Warming) -> u64| all.iter().map(of).sum::<u64>();
            let (present, wanted) = (sum(|w| w.present_bytes), sum(|w| w.wanted_bytes));
            eprint!("\r{present} of {wanted} bytes are here ");
        }
        tokio::time::sleep(LOOK).await;
        for ((node, volume), warming) in shares.iter().zip(&mut all) {
            let shown = client.call(&node.address, ShowCache { volume: *volume });
            if let Some(now) = shown.await?.warming {
                *warming = now;
            }
        }
    }
    let lines = shares.iter().zip(&all).map(|((node, _), warming)| {
        if args.unpin {
            format!("{}: unpinned", node.name)
        } else {
            format!("{}: {}", node.name, warming_text(warming))
        }
    });
    let described = shares.iter().zip(&all).map(|((node, volume), warming)| {
        json!({
            "node": node.name,
            "volume": volume.to_string(),
            "warming": describe_warming(warming),
        })
    });
    let (text, described) = (lines.collect::<Vec<_>>(), described.collect::<Vec<_>>());
    output.say(&text.join("\n"), &described)?;
    let failed = all.iter().find_map(|warming| match &warming.state {
        WarmState::Failed(error) => Some(error.clone()),
        WarmState::Running | WarmState::Done | WarmState::Full => None,
    });
    match failed {
        Some(error) if args.wait => bail!("not everything was fetched: {error}"),
        _ => Ok(()),
    }
}

/// The volumes that are meant, with their nodes: all shares of a cooperative cache.
async fn shares(client: &Client, wanted: &str) -> Result<Vec<(Advert, VolumeId)>> {
    let (volumes, silent) = client.volumes().await?;
    for name in silent {
        eprintln!("node {name} did not answer; its share is not warmed");
    }
    let id = wanted.parse::<VolumeId>().ok();
    let is_meant = |v: &VolumeStatus| {
        Some(v.spec.id) == id
            || v.spec.name == wanted
            || cooperative(v).is_some_and(|name| name == wanted)
    };
    let meant: Vec<_> = volumes.iter().filter(|(_, v)| is_meant(v)).collect();
    if let Some((_, v)) = meant.iter().find(|(_, v)| cooperative(v).is_none()) {
        bail!(
            "{} is a scratch volume; only a cache is warmed",
            v.spec.name
        );
    }
    let names: Vec<_> = meant
        .iter()
        .filter_map(|(_, v)| cooperative(v))
        .filter(|name| !name.is_empty())
        .collect();
    let shares = volumes
        .iter()
        .filter(|(_, v)| is_meant(v) || cooperative(v).is_some_and(|name| names.contains(&name)));
    let shares: Vec<_> = shares.map(|(node, v)| (node.clone(), v.spec.id)).collect();
    if shares.is_empty() {
        bail!("no cache volume '{wanted}' on any live node; see `bafs volume list`");
    }
    Ok(shares)
}

fn cooperative(volume: &VolumeStatus) -> Option<&str> {
    match &volume.spec.kind {
        VolumeKind::Cache { cooperative, .. } => Some(cooperative),
        VolumeKind::Scratch { .. } => None,
    }
}

/// Further lines of `bafs volume show`.
pub(super) fn text(cache: &CacheStatus) -> String {
    let mut text = format!(
        "\n  shows {} files of {} bytes in blocks of {}; keeps {} bytes as primary, {} as copies, \
         {} pinned",
        cache.source_files,
        cache.source_bytes,
        cache.block_bytes,
        cache.primary_bytes,
        cache.secondary_bytes,
        cache.pinned_bytes
    );
    if !cache.pins.is_empty() {
        let pins = cache.pins.iter().map(|pin| match pin.as_str() {
            "" => "everything",
            pin => pin,
        });
        let _ = write!(text, "\n  pinned: {}", pins.collect::<Vec<_>>().join(", "));
    }
    if let Some(warming) = &cache.warming {
        let _ = write!(text, "\n  warming: {}", warming_text(warming));
    }
    let count = |name: &str| cache.counts.get(name).copied().unwrap_or(0);
    let _ = write!(
        text,
        "\n  read by jobs: {} bytes from here, {} from peers; from home {} for {} wanted{}",
        count("cache_hit_local_bytes"),
        count("cache_hit_peer_bytes"),
        count("cache_home_bytes"),
        count("cache_wanted_bytes"),
        home_ratio(cache).map_or_else(String::new, |ratio| format!(" ({ratio:.3})"))
    );
    let passed = count("cache_pass_through");
    if passed > 0 {
        let _ = write!(
            text,
            "\n  {passed} blocks found no room and were passed through"
        );
    }
    for peer in &cache.peers {
        let count = |name: &str| peer.counts.get(name).copied().unwrap_or(0);
        let used = peer
            .used_bytes
            .map_or_else(|| "?".to_owned(), |used| used.to_string());
        let _ = write!(
            text,
            "\n  peer {} at {}: {used} of {} bytes used; gave {} bytes",
            peer.server,
            peer.address,
            peer.capacity_bytes,
            count("bytes")
        );
        if peer.suspect {
            text.push_str("; does not answer");
        }
        let wrong = count("digest_failures");
        if wrong > 0 {
            let _ = write!(text, "; SENT WRONG BYTES {wrong} times");
        }
    }
    text
}

/// The part of `bafs volume show --json` that is about a cache (`docs/CACHE.md`).
pub(super) fn describe(cache: &CacheStatus) -> Value {
    let peers = cache.peers.iter().map(|peer| {
        json!({
            "server": peer.server.to_string(),
            "address": peer.address,
            "capacity_bytes": peer.capacity_bytes,
            "used_bytes": peer.used_bytes,
            "suspect": peer.suspect,
            "counts": peer.counts,
        })
    });
    json!({
        "cooperative": cache.cooperative,
        "block_bytes": cache.block_bytes,
        "source_bytes": cache.source_bytes,
        "source_files": cache.source_files,
        "capacity_bytes": cache.capacity_bytes,
        "primary_bytes": cache.primary_bytes,
        "secondary_bytes": cache.secondary_bytes,
        "pinned_bytes": cache.pinned_bytes,
        "pins": cache.pins,
        "warming": cache.warming.as_ref().map(describe_warming),
        "home_ratio": home_ratio(cache),
        "counts": cache.counts,
        "peers": peers.collect::<Vec<_>>(),
    })
}

/// Bytes read from home for each byte that was wanted of this node as its primary.
fn home_ratio(cache: &CacheStatus) -> Option<f64> {
    let count = |name: &str| cache.counts.get(name).copied().unwrap_or(0);
    let wanted = count("cache_wanted_bytes");
    (wanted > 0).then(|| count("cache_home_bytes") as f64 / wanted as f64)
}

fn describe_warming(warming: &Warming) -> Value {
    json!({
        "path": warming.path,
        "state": state_name(&warming.state),
        "fault": match &warming.state {
            WarmState::Failed(error) => Some(error.to_string()),
            WarmState::Running | WarmState::Done | WarmState::Full => None,
        },
        "wanted_bytes": warming.wanted_bytes,
        "present_bytes": warming.present_bytes,
    })
}

fn warming_text(warming: &Warming) -> String {
    let path = match warming.path.as_str() {
        "" => "everything",
        path => path,
    };
    let (present, wanted) = (warming.present_bytes, warming.wanted_bytes);
    let state = match &warming.state {
        WarmState::Full => "full: no more finds room, make the volume larger".to_owned(),
        WarmState::Failed(error) => format!("failed: {error}"),
        other => state_name(other).to_owned(),
    };
    format!("{path}, {present} of {wanted} bytes are here, {state}")
}

fn state_name(state: &WarmState) -> &'static str {
    match state {
        WarmState::Running => "running",
        WarmState::Done => "done",
        WarmState::Full => "full",
        WarmState::Failed(_) => "failed",
    }
}
