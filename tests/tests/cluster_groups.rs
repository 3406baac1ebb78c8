//! Cooperative caches of several groups on one subnet: real processes, of which some are told
//! their group. Each group reads from home once, and asks nothing of the other.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_tests::api::{CacheSpec, CacheVolume};
use bafs_tests::cache_cluster::{CacheCluster, run_compare_job};
use bafs_tests::content::Content;
use bafs_tests::{mount_obstacle, report_skip};

const MIB: usize = 1 << 20;

/// Nodes that are given no group, so that they have that of their subnet.
const SUBNET_NODES: [&str; 2] = ["n1", "n2"];

/// Nodes that are given one.
const EAST_NODES: [&str; 2] = ["e1", "e2"];

/// A cluster of both groups.
fn start_cluster() -> Result<CacheCluster> {
    let mut stage = CacheCluster::start(SUBNET_NODES.len(), "100MB", None)?;
    for name in EAST_NODES {
        let more = ["--size", "100MB", "--slots", "2", "--group", "east"];
        stage.test_cluster.cluster.add_node(name, &more)?;
    }
    stage
        .test_cluster
        .wait_for_servers(1 + SUBNET_NODES.len() + EAST_NODES.len())?;
    Ok(stage)
}

fn node_addresses(stage: &CacheCluster, names: &[&str]) -> Vec<String> {
    let address = |name: &&str| stage.test_cluster.cluster.address(name).to_owned();
    names.iter().map(address).collect()
}

/// What the catalog tells of the nodes' groups.
fn catalog_groups(stage: &CacheCluster) -> Result<BTreeMap<String, String>> {
    let listed = stage.test_cluster.run_json(&["servers"])?;
    let servers = listed.as_array().context("a list")?;
    let text = |server: &serde_json::Value, key: &str| {
        let text = server[key].as_str().map(str::to_owned);
        text.with_context(|| format!("{key} of {server}"))
    };
    servers
        .iter()
        .map(|server| Ok((text(server, "name")?, text(server, "group")?)))
        .collect()
}

/// Addresses of those with whom a volume's node believes to share the cache.
fn peer_addresses(stage: &CacheCluster, volume: &CacheVolume) -> Result<Vec<String>> {
    let shown = stage
        .test_cluster
        .run_json(&["volume", "show", &volume.id.to_string()])?;
    let peers = shown["cache"]["peers"].as_array().context("peers")?;
    let address = |peer: &serde_json::Value| peer["address"].as_str().map(str::to_owned);
    peers
        .iter()
        .map(|peer| address(peer).context("an address"))
        .collect()
}

/// Calls by which nodes share caches, that these nodes have received.
fn count_peer_calls(stage: &CacheCluster, nodes: &[String]) -> Result<u64> {
    let calls = ["calls.JoinCache", "calls.ReadBlocks", "calls.Probe"];
    calls
        .iter()
        .map(|call| stage.sum_counter(nodes, call))
        .sum()
}

#[test]
fn cluster_groups_fetch_once_each_and_share_nothing() -> Result<()> {
    let content = Content::new(51, 6 * MIB);
    let needed = content.bytes().len() as u64;
    let stage = start_cluster()?;
    stage.write_data_set("set", &content)?;
    let known = catalog_groups(&stage)?;
    for (names, group) in [(SUBNET_NODES, "loopback"), (EAST_NODES, "east")] {
        for name in names {
            let found = known.get(name).map(String::as_str);
            ensure!(found == Some(group), "{name} is in {found:?}");
        }
    }
    let (subnet, east) = (
        node_addresses(&stage, &SUBNET_NODES),
        node_addresses(&stage, &EAST_NODES),
    );
    let nodes = [subnet.clone(), east.clone()].concat();
    let volumes = stage.create_caches(&nodes, &CacheSpec::new("set", 16 << 20))?;
    let (of_subnet, of_east) = volumes.split_at(subnet.len());
    let mut sent = 0;
    for (own, own_nodes, others) in [(of_subnet, &subnet, &east), (of_east, &east, &subnet)] {
        let asked = count_peer_calls(&stage, others)?;
        for volume in own {
            stage.check_scan(volume, &content)?;
        }
        let now = stage.read_home_bytes()?;
        ensure!(
            now - sent == needed,
            "home sent a group {} bytes, {needed} are needed",
            now - sent
        );
        sent = now;
        for volume in own {
            let mut expected = own_nodes.clone();
            expected.retain(|node| *node != volume.node);
            let found = peer_addresses(&stage, volume)?;
            ensure!(found == expected, "{} shares with {found:?}", volume.node);
        }
        let asked = count_peer_calls(&stage, others)? - asked;
        ensure!(asked == 0, "the other group was asked {asked} times");
        let given = stage.sum_counter(own_nodes, "cache_served_to_peers_bytes")?;
        ensure!(given > 0, "nobody gave anything: nothing was tested");
        let passed_over = stage.sum_counter(own_nodes, "cache_fallbacks")?;
        ensure!(
            passed_over == 0,
            "{passed_over} times a peer was passed over"
        );
    }
    Ok(())
}

#[test]
fn cluster_groups_serve_cached_data_to_outside_jobs() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        let name = "cluster_groups_serve_cached_data_to_outside_jobs";
        report_skip(name, &reason);
        return Ok(());
    }
    let content = Content::new(52, 3 * MIB);
    let needed = content.bytes().len() as u64;
    let stage = start_cluster()?;
    stage.write_data_set("far", &content)?;
    let (subnet, east) = (
        node_addresses(&stage, &SUBNET_NODES),
        node_addresses(&stage, &EAST_NODES),
    );
    let volumes = stage.create_caches(&subnet, &CacheSpec::new("far", 16 << 20))?;
    stage.check_scan(&volumes[0], &content)?;
    // As from another machine: nothing is handed over.
    let handoff = stage
        .test_cluster
        .cluster
        .directory()
        .join("n1")
        .join(HANDOFF_SOCKET_NAME);
    fs::rename(&handoff, handoff.with_extension("away"))?;
    // No node of this job's group has the volume: it asks the node of the volume for each block.
    let before = stage.sum_counter(&subnet[..1], "cache_hit_local_bytes")?;
    let (api_client, target) = (stage.client.client().clone(), volumes[0].mount_target());
    let script = stage.compare_script("far");
    let job = run_compare_job(api_client, east[0].clone(), target, script);
    let wrong = stage.client.block_on(job)?;
    ensure!(wrong == 0, "{wrong} bytes are wrong");
    let read = stage.sum_counter(&subnet[..1], "cache_hit_local_bytes")? - before;
    ensure!(
        read >= needed,
        "the volume's node counts {read} of {needed} bytes"
    );
    let sent = stage.read_home_bytes()?;
    ensure!(
        sent == needed,
        "home sent {sent} bytes, {needed} are needed"
    );
    let kept = stage.sum_counter(&east, "cache_home_bytes")?
        + stage.sum_counter(&east, "cache_hit_peer_bytes")?;
    ensure!(kept == 0, "the other group took {kept} bytes into caches");
    Ok(())
}
