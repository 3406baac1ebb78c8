//! Servers in bad surroundings: full disks and senders of garbage.

use std::io::Write;
use std::net::{TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_proto::message::MountTarget;
use bafs_tests::cache_cluster::{CacheCluster, DATA_FILE};
use bafs_tests::content::Content;
use bafs_tests::exec_job::{self, ExecJob};
use bafs_tests::small_disk::{fill_disk, path_in_namespace, start_node_on_disk};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

#[test]
fn cluster_node_recovers_after_its_disk_was_full() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        report_skip(
            "cluster_node_recovers_after_its_disk_was_full",
            "it needs root to mount a small file system",
        );
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = start_node_on_disk("-t tmpfs -o size=20m tmpfs", &world, &store)?;
    world.wait_for_servers(3)?;
    let create = |name: &str| {
        let args = ["volume", "create", name, "--node", "small", "--size", "1MB"];
        world.bafs_command(&args).output()
    };
    let filler = path_in_namespace(&node, &store).join("fill");
    fill_disk(&filler)?;
    for name in ["a", "b"] {
        let output = create(name)?;
        ensure!(!output.status.success(), printed_text(&output));
        ensure!(
            printed_text(&output).contains("No space left"),
            printed_text(&output)
        );
        ensure!(
            !printed_text(&output).contains("is left"),
            printed_text(&output)
        );
        let left = world.run_json(&["volume", "list"])?;
        ensure!(left.as_array().is_some_and(Vec::is_empty), "{left}");
    }
    std::fs::remove_file(&filler)?;
    let output = create("c")?;
    ensure!(output.status.success(), printed_text(&output));
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

#[test]
fn cluster_node_deletes_and_restarts_on_full_disk() -> Result<()> {
    let name = "cluster_node_deletes_and_restarts_on_full_disk";
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "it needs root to mount a small file system");
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    let directory = tempfile::tempdir()?;
    let disk = directory.path().join("disk");
    std::fs::create_dir(&disk)?;
    let mount = |args: &[&str]| Command::new(args[0]).args(&args[1..]).arg(&disk).status();
    let mounted = mount(&["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs"])?;
    ensure!(mounted.success(), "no small file system");
    let result = check_delete_and_restart(&world, &disk);
    let unmounted = mount(&["umount", "-l"])?;
    ensure!(unmounted.success(), "the small file system stays");
    result
}

fn check_delete_and_restart(world: &TestCluster, disk: &Path) -> Result<()> {
    let store = disk.to_string_lossy().into_owned();
    let mut node = start_node_on_disk(&format!("--bind {store}"), world, &store)?;
    world.wait_for_servers(3)?;
    world.run_json(&["volume", "create", "v", "--node", "small", "--size", "9MB"])?;
    let volumes = disk.join("node/volumes");
    let volume = std::fs::read_dir(&volumes)?.next().context("a volume")??;
    fill_disk(&volume.path().join("tree/x"))?;
    world.run_json(&["volume", "delete", "v"])?;
    let trash = disk.join("node/trash");
    for _ in 0..100 {
        if std::fs::read_dir(&trash)?.next().is_none() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(
        std::fs::read_dir(&trash)?.next().is_none(),
        "what was deleted stays"
    );
    world.run_json(&["volume", "create", "w", "--node", "small", "--size", "9MB"])?;
    fill_disk(&disk.join("foreign"))?;
    drop(node.stdin.take());
    node.wait()?;
    for _ in 0..2 {
        let mut node = start_node_on_disk(&format!("--bind {store}"), world, &store)?;
        world.run_json(&["volume", "show", "w"])?;
        drop(node.stdin.take());
        node.wait()?;
        fill_disk(&disk.join("more"))?;
    }
    Ok(())
}

/// A file system that answers nobody until this is dropped.
struct FrozenFileSystem(std::path::PathBuf);

impl FrozenFileSystem {
    fn freeze(path: &Path) -> Result<Self> {
        let frozen = Self(path.to_owned());
        ensure!(
            frozen.write_freeze_state("-f")?,
            "the file system does not freeze"
        );
        Ok(frozen)
    }

    fn write_freeze_state(&self, how: &str) -> Result<bool> {
        let set = Command::new("fsfreeze").arg(how).arg(&self.0).status()?;
        Ok(set.success())
    }
}

impl Drop for FrozenFileSystem {
    fn drop(&mut self) {
        let _ = self.write_freeze_state("-u");
    }
}

#[test]
fn cluster_waits_for_disks_slower_than_the_deadline() -> Result<()> {
    let name = "cluster_waits_for_disks_slower_than_the_deadline";
    let Some(world) = exec_job::start_cluster(name, "20MB")? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("image").display().to_string();
    let make = format!("truncate -s 64M {image} && mkfs.ext4 -q {image} && losetup -f");
    let made = Command::new("sh").args(["-c", &make]).output()?;
    if !made.status.success() {
        report_skip(name, &format!("no loop device: {}", printed_text(&made)));
        return Ok(());
    }
    let store = directory.path().join("store");
    std::fs::create_dir(&store)?;
    let store = store.to_string_lossy().into_owned();
    let mut node = start_node_on_disk(&format!("-o loop {image}"), &world, &store)?;
    world.wait_for_servers(3)?;
    let disk = path_in_namespace(&node, &store);
    std::fs::remove_file(disk.join("node").join(HANDOFF_SOCKET_NAME))?;
    let make = ["volume", "create", "v", "--node", "small", "--size", "9MB"];
    world.run_json(&make)?;
    let go = directory.path().join("go");
    let script = format!(
        "echo ready; while [ ! -e {} ]; do sleep 0.1; done; \
        echo x > /vol/f; sync /vol/f; mv /vol/f /vol/g; sync /vol; test $(cat /vol/g) = x",
        go.display()
    );
    let busy = ExecJob::start(&world, &["--operation-timeout", "3"], &script)?;
    let frozen = FrozenFileSystem::freeze(&disk)?;
    std::fs::write(&go, "")?;
    std::thread::sleep(Duration::from_secs(8));
    drop(frozen);
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.success(), printed_text(&ended));
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

#[test]
fn cluster_waits_for_homes_slower_than_the_deadline() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_waits_for_homes_slower_than_the_deadline", &reason);
        return Ok(());
    }
    let stage = CacheCluster::start(1, "20MB", Some("400KB/s"))?;
    stage.write_data_set("db", &Content::new(7, 4 << 20))?;
    let target = MountTarget::Home {
        server: stage.test_cluster.cluster.home_address().to_owned(),
        path: "db".to_owned(),
    };
    // All is asked for at once, and comes within ten seconds.
    let original = stage.test_cluster.home.path().join("db").join(DATA_FILE);
    let script = format!(
        "part() {{ dd if=$1 bs=1M skip=$2 count=1 2>/dev/null | cksum; }}; \
         same() {{ test \"$(part /data/{DATA_FILE} $1)\" = \"$(part {} $1)\" && echo same; }}; \
         for i in 0 1 2 3; do same $i & done; wait",
        original.display()
    );
    let (api_client, node) = (stage.client.client(), stage.node_addresses().remove(0));
    let report = stage.client.block_on(async {
        let start =
            api_client.start_job_with(&node, target, &script, |job| job.op_deadline_ms = 3_000);
        api_client.wait_for_job(&node, start.await?).await
    })?;
    ensure!(report.output_tail == "same\n".repeat(4), "{report:?}");
    // Nothing was asked for twice.
    ensure!(
        stage.read_home_bytes()? == 4 << 20,
        "{}",
        stage.read_home_bytes()?
    );
    Ok(())
}

#[test]
fn cluster_survives_garbage_at_its_ports() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
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
    let made = world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])?;
    ensure!(!made.is_null(), "{made}");
    for name in ["catalog", "home", "n1"] {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", world.cluster.pid(name)?))?;
        ensure!(!stat.contains(") Z "), "{name} died");
    }
    Ok(())
}
