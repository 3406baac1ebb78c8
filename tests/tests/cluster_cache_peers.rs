//! The cooperative cache when its peers fail: killed, stopped, cut off from one another. Every
//! byte must be right, and every reader must end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::net::channel::{Channel, set_channel};
use bafs_tests::api::{CacheSpec, CacheVolume};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::cache_cluster::{CacheCluster, DATA_FILE, count_wrong_bytes};
use bafs_tests::content::Content;
use bafs_tests::report_skip;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;

const MIB: usize = 1 << 20;

/// Reads everything on several volumes at once while something happens on the side.
fn scan_while(
    stage: &mut CacheCluster,
    volumes: &[CacheVolume],
    content: &Arc<Content>,
    disturb: impl FnOnce(&mut bafs::cluster::Cluster) -> Result<()> + Send,
) -> Result<()> {
    let mut readers = Vec::new();
    for volume in volumes {
        let (api_client, volume) = (stage.new_reader()?, volume.clone());
        let content = content.clone();
        readers.push(async move { count_wrong_bytes(api_client, volume, &content).await });
    }
    let CacheCluster {
        test_cluster: world,
        client: api,
        ..
    } = stage;
    let wrong: u64 = std::thread::scope(|scope| -> Result<_> {
        let disturbing = scope.spawn(|| disturb(&mut world.cluster));
        let read = api.run_all(readers);
        disturbing.join().ok().context("who disturbs broke off")??;
        Ok(read?.into_iter().sum())
    })?;
    ensure!(wrong == 0, "{wrong} bytes are wrong");
    Ok(())
}

/// Waits until home has sent so many bytes: the reads are under way.
fn wait_for_home_bytes(stage_home: impl Fn() -> Result<u64>, bytes: u64) -> Result<()> {
    for _ in 0..400 {
        if stage_home()? >= bytes {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    anyhow::bail!("home sent less than {bytes} bytes in ten seconds")
}

/// A function that asks home how many bytes it sent, for another thread.
fn home_byte_reader(stage: &CacheCluster) -> Result<impl Fn() -> Result<u64> + use<>> {
    let api = bafs_tests::api::BlockingClient::new(&stage.test_cluster.cluster.identity())?;
    let home = stage.test_cluster.cluster.home_address().to_owned();
    Ok(move || {
        let counters = api.block_on(api.client().read_counters(&home))?;
        Ok(counters.get("home_read_bytes").copied().unwrap_or(0))
    })
}

#[test]
fn cluster_cache_survives_a_primary_killed_during_reads() -> Result<()> {
    let content = Arc::new(Content::new(1, 12 * MIB));
    let needed = content.bytes().len() as u64;
    let mut stage = CacheCluster::start(4, "100MB", Some("4MB/s"))?;
    stage.write_data_set("killed", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("killed", 16 << 20))?;
    let sent = home_byte_reader(&stage)?;
    scan_while(&mut stage, &volumes[..2], &content, |cluster| {
        wait_for_home_bytes(sent, needed / 3)?;
        cluster.kill("n4")
    })?;
    // What the dead node alone had is asked for once more, and nothing else: its share of a third,
    // of which the readers hold copies already.
    let sent = stage.read_home_bytes()?;
    ensure!(
        sent >= needed,
        "home sent {sent} of {needed} bytes: nothing was cold"
    );
    ensure!(
        sent <= needed + needed / 6,
        "home sent {sent} bytes, {needed} are needed"
    );
    let fallbacks = stage.sum_counter(&stage.node_addresses()[..2], "cache_fallbacks")?;
    ensure!(
        fallbacks > 0,
        "nobody noticed the death: nothing was tested"
    );
    Ok(())
}

#[test]
fn cluster_cache_readers_bypass_a_stopped_peer() -> Result<()> {
    let content = Arc::new(Content::new(2, 12 * MIB));
    let needed = content.bytes().len() as u64;
    let mut stage = CacheCluster::start(3, "100MB", Some("4MB/s"))?;
    stage.write_data_set("stopped", &content)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("stopped", 16 << 20),
    )?;
    let sent = home_byte_reader(&stage)?;
    let stopped = scan_while(&mut stage, &volumes[..1], &content, |cluster| {
        wait_for_home_bytes(sent, needed / 3)?;
        cluster.signal("n3", Signal::SIGSTOP)
    });
    // The scan ended although the peer still sleeps; it takes part again when it wakes up.
    stage.test_cluster.cluster.signal("n3", Signal::SIGCONT)?;
    stopped?;
    let fallbacks = stage.sum_counter(&stage.node_addresses()[..1], "cache_fallbacks")?;
    ensure!(
        fallbacks > 0,
        "nobody noticed the sleep: nothing was tested"
    );
    scan_while(&mut stage, &volumes[2..], &content, |_| Ok(()))
}

/// The UDP ports that a process sends from or listens at.
fn udp_ports(pid: u32) -> Result<Vec<u16>> {
    let mut inodes = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let found = fs::metadata(entry.path());
        inodes.extend(found.map(|found| found.ino()).ok());
    }
    let table = fs::read_to_string(format!("/proc/{pid}/net/udp"))?;
    let port = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let inode: u64 = words.get(9)?.parse().ok()?;
        let (_, port) = words.get(1)?.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        inodes.contains(&inode).then_some(port)
    };
    Ok(table.lines().skip(1).filter_map(port).collect())
}

/// Lets the kernel drop all packets between two processes of this network name space.
fn block_packets_between(one: u32, other: u32) -> Result<()> {
    let set = |pid| -> Result<String> {
        let ports = udp_ports(pid)?;
        ensure!(!ports.is_empty(), "process {pid} has no UDP port");
        Ok(ports
            .iter()
            .map(u16::to_string)
            .collect::<Vec<_>>()
            .join(", "))
    };
    let (one, other) = (set(one)?, set(other)?);
    let rules = format!(
        "table inet cut {{ chain input {{\ntype filter hook input priority 0\n\
         udp sport {{ {one} }} udp dport {{ {other} }} drop\n\
         udp sport {{ {other} }} udp dport {{ {one} }} drop\n}}\n}}\n"
    );
    let ruled = Command::new("nft").arg(&rules).output()?;
    ensure!(
        ruled.status.success(),
        "nft: {}",
        String::from_utf8_lossy(&ruled.stderr)
    );
    Ok(())
}

/// Moves this thread, and what it starts, to a network of its own. Why not, if it cannot be.
fn enter_private_network() -> Option<String> {
    if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
        return Some(format!("a network of one's own needs root: {error}"));
    }
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    let ruled = Command::new("nft").args(["list", "ruleset"]).output();
    let works = up.is_ok_and(|up| up.success()) && ruled.is_ok_and(|out| out.status.success());
    (!works).then(|| "ip or nft do not work here".to_owned())
}

#[test]
fn cluster_cache_peers_cut_off_pairwise_still_share() -> Result<()> {
    if let Some(reason) = enter_private_network() {
        let name = "cluster_cache_peers_cut_off_pairwise_still_share";
        report_skip(name, &reason);
        return Ok(());
    }
    // Below processes are told apart by their ports: for QUIC they keep one, for TCP they take
    // another for each connection.
    set_channel(Channel::Quic);
    let content = Arc::new(Content::new(3, 6 * MIB));
    let needed = content.bytes().len() as u64;
    let mut stage = CacheCluster::start(3, "100MB", None)?;
    stage.write_data_set("cut", &content)?;
    let volumes = stage.create_caches(&stage.node_addresses(), &CacheSpec::new("cut", 16 << 20))?;
    // The first two see the third, and the third both, but not each other.
    let pid = |name| stage.test_cluster.cluster.pid(name);
    block_packets_between(pid("n1")?, pid("n2")?)?;
    scan_while(&mut stage, &volumes[..2], &content, |_| Ok(()))?;
    let fallbacks = stage.sum_counter(&stage.node_addresses()[..2], "cache_fallbacks")?;
    ensure!(fallbacks > 0, "nothing was cut off: nothing was tested");
    // The third has what the others fetched at its disposal: it reads without home.
    let before = stage.read_home_bytes()?;
    scan_while(&mut stage, &volumes[2..], &content, |_| Ok(()))?;
    let more = stage.read_home_bytes()? - before;
    ensure!(
        more == 0,
        "{more} bytes were fetched although peers have them"
    );
    // Twice what one of the two is primary of when the other is next: a third of all. Were each on
    // its own, everything would have come twice.
    ensure!(
        2 * before <= 3 * needed,
        "home sent {before} bytes for a set of {needed}"
    );
    Ok(())
}

/// Nodes are killed, stopped and started at random while others read.
#[test]
#[ignore = "long: `cargo xtask soak` runs it"]
fn cluster_cache_survives_long_churn() -> Result<()> {
    let seed: u64 = std::env::var("SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(1);
    println!("SEED={seed}");
    let content = Arc::new(Content::new(seed, 32 * MIB));
    let rng = Content::new(seed + 1, 1000);
    let mut stage = CacheCluster::start(6, "200MB", Some("8MB/s"))?;
    stage.write_data_set("churn", &content)?;
    for round in 0..30 {
        let spec = CacheSpec {
            cooperative: format!("churn-{round}"),
            ..CacheSpec::new("churn", 16 << 20)
        };
        let volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
        let rolls = &rng.bytes()[round * 30..][..30];
        scan_while(&mut stage, &volumes[..3], &content, |cluster| {
            for roll in rolls.chunks(2).take(6) {
                let name = format!("n{}", 4 + roll[0] % 3);
                std::thread::sleep(Duration::from_millis(u64::from(roll[1]) * 4));
                if roll[0] & 64 == 0 {
                    cluster.kill(&name)?;
                    // After nine seconds nobody believes in it any more, and its share has moved.
                    let away_ms = if roll[1].is_multiple_of(4) {
                        9_000
                    } else {
                        500
                    };
                    std::thread::sleep(Duration::from_millis(away_ms));
                    cluster.restart(&name)?;
                } else {
                    cluster.signal(&name, Signal::SIGSTOP)?;
                    std::thread::sleep(Duration::from_millis(1500));
                    cluster.signal(&name, Signal::SIGCONT)?;
                }
            }
            Ok(())
        })?;
        stage.delete_volumes(&volumes)?;
    }
    Ok(())
}

#[test]
fn cluster_cache_finds_its_home_at_another_port() -> Result<()> {
    let content = Content::new(8, 2 * MIB);
    let mut stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("moved", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("moved", 16 << 20))?;
    let before = stage.test_cluster.cluster.home_address().to_owned();
    stage.test_cluster.cluster.kill("home")?;
    // Others, which have such a file too: one of that name, one at the address before.
    let (namesake, successor) = (tempfile::tempdir()?, tempfile::tempdir()?);
    for other in [&namesake, &successor] {
        fs::create_dir(other.path().join("moved"))?;
        Content::new(9, 2 * MIB).write_file(&other.path().join("moved").join(DATA_FILE))?;
    }
    let serve = |export: &Path, more: &[&str]| -> Result<_> {
        let export = export.to_string_lossy().into_owned();
        let args = [
            "--json",
            "home",
            "--export",
            &export,
            "--until-stdin-closes",
        ];
        let mut home = stage.test_cluster.bafs_command(&[&args, more].concat());
        let home = home.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut home = home.spawn()?;
        let mut line = String::new();
        let stdout = home.stdout.take().context("it is piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let is_there = line.contains(&before);
        ensure!(is_there != more.is_empty(), "{line}: not where it is to be");
        Ok(home)
    };
    let successor = serve(successor.path(), &["--name", "other", "--listen", &before])?;
    // The catalog lists one home of a name, and keeps it while it lives: the first of the two. The
    // killed home keeps the name for as long as its advertisement lasts.
    let moved = serve(stage.test_cluster.home.path(), &[])?;
    wait_until(Duration::from_secs(60), || {
        let servers = stage.test_cluster.run_json(&["servers"])?;
        let mut servers = servers.as_array().into_iter().flatten();
        Ok(servers.any(|server| server["name"] == "home" && server["address"] != before.as_str()))
    })?;
    let namesake = serve(namesake.path(), &[])?;
    for volume in &volumes {
        stage.check_scan(volume, &content)?;
    }
    for mut home in [successor, moved, namesake] {
        drop(home.stdin.take());
        home.wait()?;
    }
    Ok(())
}
