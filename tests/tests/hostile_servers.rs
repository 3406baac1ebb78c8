//! Servers in bad surroundings: full disks and senders of garbage.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::{World, program, said, skip};

/// A node whose store is a file system of 20 MiB that nobody else sees; ends with its input.
fn node_on_small_disk(world: &World, store: &str) -> Result<Child> {
    let script = format!(
        "mount -t tmpfs -o size=20m tmpfs {store} && exec \"$0\" node --store {store}/node \
         --size 500MB --name small --until-stdin-closes"
    );
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", &script])
        .arg(program())
        .env("BAFS_IDENTITY", world.cluster.identity())
        .env("BAFS_CATALOG", world.cluster.catalog())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut node = command.spawn()?;
    let stdout = node.stdout.take().context("standard output is piped")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line.contains("listening"), "the node does not start");
    Ok(node)
}

#[test]
fn cluster_node_recovers_when_its_disk_has_space_again() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skip(
            "cluster_node_recovers_when_its_disk_has_space_again",
            "it needs root to mount a small file system",
        );
        return Ok(());
    }
    let world = World::start(&["20MB"])?;
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = node_on_small_disk(&world, &store)?;
    world.wait_for_servers(3)?;
    let create = |name: &str| {
        let args = ["volume", "create", name, "--node", "small", "--size", "1MB"];
        world.bafs(&args).output()
    };
    // The node's own view of its disk.
    let root = Path::new("/proc").join(node.id().to_string()).join("root");
    let fill = root.join(store.trim_start_matches('/')).join("fill");
    let mut file = std::fs::File::create(&fill)?;
    while file.write_all(&[0; 4096]).is_ok() {}
    drop(file);
    for name in ["a", "b"] {
        let output = create(name)?;
        ensure!(!output.status.success(), said(&output));
        ensure!(said(&output).contains("No space left"), said(&output));
    }
    std::fs::remove_file(&fill)?;
    let output = create("c")?;
    ensure!(output.status.success(), said(&output));
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

#[test]
fn cluster_does_not_mind_garbage_at_its_ports() -> Result<()> {
    let world = World::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    for name in ["catalog", "home", "n1"] {
        let address = world.cluster.address(name);
        for number in 0..2_000_u32 {
            // From one byte to more than a packet of QUIC; the first byte runs through all forms.
            let bytes: Vec<u8> = (0..1 + number * 7 % 1_600)
                .map(|at| (number.wrapping_mul(2_654_435_761) >> (at % 24)) as u8 ^ at as u8)
                .collect();
            socket.send_to(&bytes, address)?;
        }
    }
    // Over TCP: some who say nothing and stay, some who speak nonsense.
    let mut silent = Vec::new();
    for name in ["catalog", "home", "n1"] {
        let address = world.cluster.address(name);
        for number in 0..100_usize {
            let mut stream = TcpStream::connect(address)?;
            let bytes: Vec<u8> = (0..number * 700)
                .map(|at| ((at * number) >> 3) as u8)
                .collect();
            // It may be thrown out while it speaks.
            let _ = stream.write_all(&bytes);
            silent.push(stream);
        }
    }
    let made = world.json(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])?;
    ensure!(!made.is_null(), "{made}");
    for name in ["catalog", "home", "n1"] {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", world.cluster.pid(name)?))?;
        ensure!(!stat.contains(") Z "), "{name} died");
    }
    Ok(())
}
