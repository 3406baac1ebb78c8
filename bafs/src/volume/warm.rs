//! `bafs volume warm`, and what `bafs volume show` says of a cache volume.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Result;
use bafs_proto::cache::{CacheStatus, GetCache, Pinning, WarmCache, WarmingState, WarmingStatus};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::Advert;
use bafs_proto::volume::{VolumeKind, VolumeSource, VolumeStatus};
use bafs_proto::{Error, ErrorCode};
use serde_json::{Value, json};

use super::connection::connect;
use crate::args::VolumeWarmArgs;
use crate::client::ClusterClient;
use crate::failure::{ClassifiedError, FailureClass};
use crate::output::Printer;

/// How often it is asked how far a warming is.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A volume with its node, and how far its warming is, or why it is not warmed.
struct VolumeWarming {
    node: Advert,
    volume: VolumeId,
    warming: Result<WarmingStatus, Error>,
}

/// Warms a cache volume on its node, or a cooperative one on all of its nodes.
pub(super) async fn warm_cache(args: VolumeWarmArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let pinning = match (args.pin, args.unpin) {
        (true, _) => Pinning::Pin,
        (_, true) => Pinning::Unpin,
        _ => Pinning::FetchOnly,
    };
    let targets = find_warming_targets(&client, &args.volume).await?;
    let path = args.path.trim_matches('/');
    warm_volumes(&client, targets, (path, pinning), args.wait, output).await
}

/// Warms a path of volumes on their nodes, and waits for that if somebody wants it.
pub(crate) async fn warm_volumes(
    client: &ClusterClient,
    targets: Vec<(Advert, VolumeId)>,
    (path, pinning): (&str, Pinning),
    must_wait: bool,
    output: Printer,
) -> Result<()> {
    let mut shares = start_warming(client, targets, path, pinning).await?;
    let is_running =
        |share: &VolumeWarming| share.has_state(|state| *state == WarmingState::Running);
    while must_wait && shares.iter().any(is_running) {
        if std::io::stderr().is_terminal() {
            let under_way = || {
                shares
                    .iter()
                    .filter_map(|share| share.warming.as_ref().ok())
            };
            let sum = |of: fn(&WarmingStatus) -> u64| under_way().map(of).sum::<u64>();
            let (present, wanted) = (sum(|w| w.present_bytes), sum(|w| w.total_bytes));
            eprint!("\r{present} of {wanted} bytes are here ");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        for share in shares.iter_mut().filter(|share| share.warming.is_ok()) {
            let volume = share.volume;
            let shown = client.call(&share.node.address, GetCache { volume });
            share.warming = match shown.await {
                Ok(cache) => cache.warming.ok_or_else(|| {
                    let text = "its node restarted meanwhile; warm it again";
                    Error::new(ErrorCode::WrongState, text)
                }),
                // A share that is deleted meanwhile, or whose node ended, hides no other.
                Err(error) => Err(error.downcast::<Error>()?),
            };
        }
    }
    let lines: Vec<_> = shares
        .iter()
        .map(|share| share.format_warming_line(pinning))
        .collect();
    let described: Vec<_> = shares.iter().map(VolumeWarming::to_json).collect();
    let completion = check_completion(&shares, must_wait);
    if completion.is_err() {
        // Standard output has one document, the failure.
        output.print_remark(&lines.join("\n"))?;
        return completion;
    }
    output.print_result(&lines.join("\n"), &described)
}

/// Has all shares warmed as far as their nodes do it.
async fn start_warming(
    client: &ClusterClient,
    targets: Vec<(Advert, VolumeId)>,
    path: &str,
    pinning: Pinning,
) -> Result<Vec<VolumeWarming>> {
    let mut shares = Vec::new();
    for (node, volume) in targets {
        let call = WarmCache {
            volume,
            path: path.to_owned(),
            pinning,
        };
        let warming = match client.call(&node.address, call).await {
            Ok(warming) => Ok(warming),
            Err(error) => Err(error.downcast::<Error>()?),
        };
        shares.push(VolumeWarming {
            node,
            volume,
            warming,
        });
    }
    Ok(shares)
}

/// Fails if nothing is warmed, or less than could be: volumes of one name may show different
/// sources, and one that does not have the path has no part in it.
fn check_completion(shares: &[VolumeWarming], waited: bool) -> Result<()> {
    let is_apart = |error: &Error| error.code == ErrorCode::NotFound;
    let faults = || {
        shares
            .iter()
            .filter_map(|share| share.warming.as_ref().err())
    };
    if let Some(error) = faults().find(|error| !is_apart(error)) {
        return Err(error.clone().context("some shares are not warmed").into());
    }
    if let Some(error) = faults().next().filter(|_| faults().count() == shares.len()) {
        return Err(error.clone().context("nothing is warmed").into());
    }
    if !waited {
        return Ok(());
    }
    for share in shares {
        match share.warming.as_ref().map(|warming| &warming.state) {
            Ok(WarmingState::Failed(error)) => {
                return Err(error.clone().context("some blocks were not fetched").into());
            }
            Ok(WarmingState::Full) => {
                return Err(ClassifiedError::with_remedy(
                    FailureClass::NoSpace,
                    format!("some blocks do not fit on {}", share.node.name),
                    "make the volume larger, or warm less (--path)",
                ));
            }
            Ok(WarmingState::Running | WarmingState::Done) | Err(_) => {}
        }
    }
    Ok(())
}

impl VolumeWarming {
    fn has_state(&self, what: impl FnOnce(&WarmingState) -> bool) -> bool {
        self.warming
            .as_ref()
            .is_ok_and(|warming| what(&warming.state))
    }

    fn format_warming_line(&self, pinning: Pinning) -> String {
        let name = &self.node.name;
        match &self.warming {
            Ok(_) if pinning == Pinning::Unpin => format!("{name}: unpinned"),
            Ok(warming) => format!("{name}: {}", format_warming(warming)),
            Err(error) => format!("{name}: cannot warm {}: {error}", self.volume),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "node": self.node.name,
            "volume": self.volume.to_string(),
            "warming": self.warming.as_ref().ok().map(warming_json),
            "error": self.warming.as_ref().err().map(ToString::to_string),
        })
    }
}

/// The volumes that are meant, with their nodes: all that share their blocks with one of the id or
/// name. Those share that have one cooperative name and one source.
async fn find_warming_targets(
    client: &ClusterClient,
    wanted: &str,
) -> Result<Vec<(Advert, VolumeId)>> {
    let (volumes, silent) = client.list_volumes().await?;
    for node in &silent {
        eprintln!("warning: cannot warm the share of a node: {node}");
    }
    let id = wanted.parse::<VolumeId>().ok();
    let is_named = |v: &VolumeStatus| {
        Some(v.spec.id) == id
            || v.spec.name == wanted
            || cooperative_key(v).is_some_and(|(name, _)| name == wanted)
    };
    let named: Vec<_> = volumes.iter().filter(|(_, v)| is_named(v)).collect();
    if let Some((_, v)) = named.iter().find(|(_, v)| cooperative_key(v).is_none()) {
        return Err(ClassifiedError::with_remedy(
            FailureClass::WrongState,
            format!("{} is a scratch volume", v.spec.name),
            "name a cache volume",
        ));
    }
    let caches: Vec<_> = named
        .iter()
        .filter_map(|(_, v)| cooperative_key(v))
        .filter(|(name, _)| !name.is_empty())
        .collect();
    let shares = volumes.iter().filter(|(_, v)| {
        is_named(v) || cooperative_key(v).is_some_and(|cache| caches.contains(&cache))
    });
    let shares: Vec<_> = shares.map(|(node, v)| (node.clone(), v.spec.id)).collect();
    if shares.is_empty() {
        let class = match silent.is_empty() {
            true => FailureClass::NotFound,
            false => FailureClass::Unreachable,
        };
        return Err(ClassifiedError::with_remedy(
            class,
            format!("no cache volume '{wanted}' on any live node"),
            "see `bafs volume list`",
        ));
    }
    Ok(shares)
}

/// By what a cache volume shares its blocks with others: a name, and a source.
fn cooperative_key(volume: &VolumeStatus) -> Option<(&str, &VolumeSource)> {
    match &volume.spec.kind {
        VolumeKind::Cache {
            cooperative,
            source,
            ..
        } => Some((cooperative, source)),
        VolumeKind::Scratch { .. } => None,
    }
}

/// Further lines of `bafs volume show`.
pub(super) fn format_cache(cache: &CacheStatus) -> String {
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
    if !cache.pinned_paths.is_empty() {
        let pins = cache.pinned_paths.iter().map(|pin| match pin.as_str() {
            "" => "everything",
            pin => pin,
        });
        let _ = write!(text, "\n  pinned: {}", pins.collect::<Vec<_>>().join(", "));
    }
    if let Some(warming) = &cache.warming {
        let _ = write!(text, "\n  warming: {}", format_warming(warming));
    }
    let count = |name: &str| cache.counters.get(name).copied().unwrap_or(0);
    let _ = write!(
        text,
        "\n  since the node started: {} bytes read by jobs from here, {} came from peers, \
         {} from home for {} wanted{}",
        count("cache_hit_local_bytes"),
        count("cache_hit_peer_bytes"),
        count("cache_home_bytes"),
        count("cache_home_unique_bytes"),
        cache
            .home_ratio()
            .map_or_else(String::new, |ratio| format!("; home ratio {ratio:.3}"))
    );
    let kept = count("cache_recovered_bytes");
    if kept > 0 {
        let _ = write!(text, "; {kept} were in the cache before");
    }
    let passed = count("cache_bypassed_blocks");
    if passed > 0 {
        let _ = write!(
            text,
            "\n  {passed} blocks found no room and were passed through"
        );
    }
    for peer in &cache.peers {
        let count = |name: &str| peer.counters.get(name).copied().unwrap_or(0);
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
        if peer.is_unresponsive {
            text.push_str("; does not answer");
        }
        let wrong = count("digest_failures");
        if wrong > 0 {
            let _ = write!(text, "; SENT WRONG BYTES {wrong} times");
        }
    }
    text
}

/// The part of `bafs volume show --json` that is about a cache (`docs/guide/performance.md`).
pub(super) fn cache_json(cache: &CacheStatus) -> Value {
    let peers = cache.peers.iter().map(|peer| {
        json!({
            "server": peer.server.to_string(),
            "address": peer.address,
            "capacity_bytes": peer.capacity_bytes,
            "used_bytes": peer.used_bytes,
            "is_unresponsive": peer.is_unresponsive,
            "counters": peer.counters,
        })
    });
    json!({
        "cooperative": cache.cooperative,
        "block_bytes": cache.block_bytes,
        "peer_check": cache.peer_check,
        "source_bytes": cache.source_bytes,
        "source_files": cache.source_files,
        "capacity_bytes": cache.capacity_bytes,
        "primary_bytes": cache.primary_bytes,
        "secondary_bytes": cache.secondary_bytes,
        "pinned_bytes": cache.pinned_bytes,
        "pins": cache.pinned_paths,
        "warming": cache.warming.as_ref().map(warming_json),
        "home_ratio": cache.home_ratio(),
        "counters": cache.counters,
        "peers": peers.collect::<Vec<_>>(),
    })
}

fn warming_json(warming: &WarmingStatus) -> Value {
    json!({
        "path": warming.path,
        "state": state_name(&warming.state),
        "error": match &warming.state {
            WarmingState::Failed(error) => Some(error.to_string()),
            WarmingState::Running | WarmingState::Done | WarmingState::Full => None,
        },
        "total_bytes": warming.total_bytes,
        "cached_bytes": warming.present_bytes,
    })
}

fn format_warming(warming: &WarmingStatus) -> String {
    let path = match warming.path.as_str() {
        "" => "everything",
        path => path,
    };
    let (present, wanted) = (warming.present_bytes, warming.total_bytes);
    let state = match &warming.state {
        WarmingState::Full => "full: no space left in the volume or on its node's disk".to_owned(),
        WarmingState::Failed(error) => format!("failed: {error}"),
        other => state_name(other).to_owned(),
    };
    format!("{path}, {present} of {wanted} bytes are here, {state}")
}

fn state_name(state: &WarmingState) -> &'static str {
    match state {
        WarmingState::Running => "running",
        WarmingState::Done => "done",
        WarmingState::Full => "full",
        WarmingState::Failed(_) => "failed",
    }
}
