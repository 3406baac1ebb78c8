//! `bafs drain`: takes a node out of use without losing data.

use std::time::Duration;

use anyhow::{Context, Result};
use bafs_proto::message::{Advert, DrainNode, ServerKind};
use bafs_proto::volume::VolumeKind;

use crate::args::DrainArgs;
use crate::client::ClusterClient;
use crate::output::{Printer, print_notice};

/// Pause between two looks at the node.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// What keeps a node from being empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Remainder {
    jobs: u32,
    scratch_volumes: usize,
}

/// Drains a node, and waits until it is empty.
pub(crate) async fn drain_node(args: DrainArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let node = client.find_node(&args.node).await?;
    client
        .call(&node.address, DrainNode)
        .await
        .with_context(|| format!("cannot drain node {}", node.name))?;
    let name = node.name.clone();
    if args.no_wait {
        let json = serde_json::json!({ "node": name, "is_empty": false });
        return output.print_result(&format!("{name} drains"), &json);
    }
    let mut told = None;
    while let Some(left) = find_remainder(&client, &node).await? {
        if told.replace(left) != Some(left) {
            print_notice(&format!(
                "{name} drains: {} jobs run, {} scratch volumes are left",
                left.jobs, left.scratch_volumes
            ));
        }
        tokio::time::sleep(LOOK_PAUSE).await;
        // Of a run that ended meanwhile it may keep volumes, which go as those before. A node that
        // is gone is empty.
        let _ = client.call(&node.address, DrainNode).await;
    }
    let json = serde_json::json!({ "node": name, "is_empty": true });
    output.print_result(&format!("{name} is empty and can be stopped"), &json)
}

/// Nothing if the node is empty, or gone.
async fn find_remainder(client: &ClusterClient, node: &Advert) -> Result<Option<Remainder>> {
    let nodes = client.list_servers(Some(ServerKind::Node)).await?;
    let Some(now) = nodes.into_iter().find(|listed| listed.id == node.id) else {
        return Ok(None);
    };
    let volumes = client.list_node_volumes(&now).await?;
    let is_scratch = |kind: &VolumeKind| matches!(kind, VolumeKind::Scratch { .. });
    let scratch = volumes.iter().filter(|it| is_scratch(&it.spec.kind));
    let left = Remainder {
        jobs: now.jobs,
        scratch_volumes: scratch.count(),
    };
    let is_empty = left.jobs == 0 && left.scratch_volumes == 0;
    Ok((!is_empty).then_some(left))
}
