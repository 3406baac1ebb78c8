//! `bafs volume create` and `bafs volume replicate`. Both are safe to repeat under a chosen id: the
//! volume that an earlier attempt made is found, and one with another description is refused.

use anyhow::Result;
use bafs_proto::Error;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::BLOCK_BYTES_DEFAULT;
use bafs_proto::message::{Advert, CreateVolume, DeleteVolume, GetVolume};
use bafs_proto::token::Token;
use bafs_proto::volume::{
    LimitKind, ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec, VolumeStatus,
};

use super::connection::{PROGRESS_NOTICE_DELAY, TRANSFER_TIMEOUT_MS, connect};
use super::description::{describe_wait, print_status, source_of};
use crate::args::{LimitEnforcement, UsageError, VolumeCreateArgs, VolumeReplicateArgs};
use crate::client::ClusterClient;
use crate::failure::{ClassifiedError, FailureClass};
use crate::output::Printer;
use crate::units::parse_bytes;

pub(super) const HOUR_MS: u64 = 3600 * 1000;

/// Files of a volume of which the command says nothing: one for so many bytes, and the least.
const BYTES_PER_FILE_DEFAULT: u64 = 16 << 10;
const FILES_DEFAULT_MIN: u64 = 10_000;

/// Runs `bafs volume create`.
pub(super) async fn create_volume(args: VolumeCreateArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
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
    let size_bytes = parse_size(&args.size)?;
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
        id: args.id.unwrap_or_else(VolumeId::random),
        name: args.name.clone(),
        owner: owner_name(),
        kind,
        size_bytes,
        size_files,
        limit,
        lifetime_ms: args.lifetime_hours.saturating_mul(HOUR_MS),
    };
    let spec = match args.id {
        Some(_) => reuse_description(&client, &node, spec).await?,
        None => spec,
    };
    let status = create_on_node(&client, &node, spec).await?;
    print_status(&node, &status, output)
}

/// The specification of the volume that has this id already, if its description is the one that is
/// asked for: it may live longer by now, and its home may have another address.
async fn reuse_description(
    client: &ClusterClient,
    node: &Advert,
    spec: VolumeSpec,
) -> Result<VolumeSpec> {
    let Some((holder, found)) = find_by_id(client, node, spec.id).await? else {
        return Ok(spec);
    };
    let asked = VolumeSpec {
        lifetime_ms: found.lifetime_ms,
        kind: with_address_of(&found.kind, spec.kind),
        ..spec
    };
    if holder.id != node.id || found != asked {
        return Err(exists_error(&holder, &found));
    }
    Ok(found)
}

/// The volume of an id: on this node, else on any other.
async fn find_by_id(
    client: &ClusterClient,
    node: &Advert,
    id: VolumeId,
) -> Result<Option<(Advert, VolumeSpec)>> {
    let asked = client.call(&node.address, GetVolume { volume: id }).await;
    if let Ok(status) = asked {
        return Ok(Some((node.clone(), status.spec)));
    }
    // A node that does not answer is no reason to refuse: the id is most likely new.
    let (volumes, _) = client.list_volumes().await?;
    let mut others = volumes.into_iter();
    let found = others.find(|(_, volume)| volume.spec.id == id);
    Ok(found.map(|(holder, volume)| (holder, volume.spec)))
}

/// A kind with the address of another one's home, if it is the same home.
fn with_address_of(known: &VolumeKind, mut asked: VolumeKind) -> VolumeKind {
    let source = match &mut asked {
        VolumeKind::Scratch { fill } => fill.as_mut(),
        VolumeKind::Cache { source, .. } => Some(source),
    };
    if let (
        Some(VolumeSource::Home { address, id, .. }),
        Some(VolumeSource::Home {
            address: known_address,
            id: known_id,
            ..
        }),
    ) = (source, source_of(known))
        && id.is_some()
        && id == known_id
    {
        address.clone_from(known_address);
    }
    asked
}

fn exists_error(holder: &Advert, found: &VolumeSpec) -> anyhow::Error {
    ClassifiedError::with_remedy(
        FailureClass::Exists,
        format!(
            "id {} is of volume {} on {}, which has another description",
            found.id, found.name, holder.name
        ),
        "choose another id",
    )
}

/// A size of a volume, as words of a command give it.
pub(super) fn parse_size(size: &str) -> Result<u64> {
    match size.trim() {
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
    let text = format!(
        "cannot create volume {}: {}{left}",
        status.spec.name, fault.detail
    );
    Err(Error::new(fault.code, text).into())
}

/// Whether a node knows a volume no more.
async fn is_gone(client: &ClusterClient, node: &Advert, volume: VolumeId) -> bool {
    let volumes = client.list_node_volumes(node).await;
    volumes.is_ok_and(|volumes| volumes.iter().all(|v| v.spec.id != volume))
}

/// Runs `bafs volume replicate`.
pub(super) async fn replicate_volume(args: VolumeReplicateArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let target = client.find_node(&args.to).await?;
    let earlier = match args.id {
        Some(id) => find_by_id(&client, &target, id).await?,
        None => None,
    };
    if let Some((holder, spec)) = earlier {
        if holder.id != target.id || !is_copy_of(&client, &spec, &args.volume).await {
            return Err(exists_error(&holder, &spec));
        }
        // The original may be gone by now.
        let copy = create_on_node(&client, &target, spec).await?;
        return print_status(&target, &copy, output);
    }
    let (holder, status) = client.find_volume(&args.volume).await?;
    if !matches!(status.spec.kind, VolumeKind::Scratch { .. }) {
        return Err(ClassifiedError::with_remedy(
            FailureClass::WrongState,
            format!("{} is a cache volume", status.spec.name),
            "create one on the other node instead",
        ));
    }
    if holder.id == target.id {
        return Err(ClassifiedError::with_remedy(
            FailureClass::WrongState,
            format!("{} is on {} already", status.spec.name, target.name),
            "name another node",
        ));
    }
    let source = VolumeSource::Volume {
        address: holder.address,
        volume: status.spec.id,
    };
    let spec = VolumeSpec {
        id: args.id.unwrap_or_else(VolumeId::random),
        owner: owner_name(),
        kind: VolumeKind::Scratch { fill: Some(source) },
        ..status.spec
    };
    let copy = create_on_node(&client, &target, spec).await?;
    print_status(&target, &copy, output)
}

/// Whether a volume is a copy of the one that these words mean.
async fn is_copy_of(client: &ClusterClient, spec: &VolumeSpec, wanted: &str) -> bool {
    let Some(VolumeSource::Volume { volume, .. }) = source_of(&spec.kind) else {
        return false;
    };
    if wanted.parse() == Ok(*volume) {
        return true;
    }
    // A name is that of the copy, too.
    let named = client.find_volumes(wanted).await.unwrap_or_default();
    named.iter().any(|(_, it)| it.spec.id == *volume)
}

pub(crate) fn owner_name() -> String {
    std::env::var("USER").unwrap_or_else(|_| format!("uid {}", nix::unistd::getuid()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Cli;

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
