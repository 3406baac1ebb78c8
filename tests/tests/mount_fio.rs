//! fio writes patterns that it knows again, in every way that it can write, and looks at them.

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, find_tool, mount_obstacle, printed_text, report_skip};

/// How it writes: the engine, whether past the page cache, the order and the size of a write.
const WRITE_METHODS: [[&str; 4]; 5] = [
    ["psync", "0", "randwrite", "4k"],
    ["mmap", "0", "randrw", "16k"],
    ["libaio", "1", "write", "1m"],
    ["libaio", "1", "randrw", "64k"],
    ["io_uring", "0", "randwrite", "32k"],
];

/// On a volume through the node's door, and on one over the network.
#[test]
#[ignore = "some GiB"]
fn mount_returns_data_written_by_fio() -> Result<()> {
    let name = "mount_returns_data_written_by_fio";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    if find_tool("fio").is_none() {
        report_skip(name, "fio is missing: apt-get install fio");
        return Ok(());
    }
    let world = TestCluster::start(&["3GB"])?;
    world.wait_for_servers(2)?;
    for way in ["inline", "calls"] {
        world.run_json(&["volume", "create", way, "--node", "n1", "--size", "1GB"])?;
        if way == "calls" {
            let handoff = world.cluster.directory().join("n1").join("handoff.sock");
            std::fs::remove_file(&handoff).context("the node has a door")?;
        }
        for [engine, direct, order, size] in WRITE_METHODS {
            let script = format!(
                "cd /vol && fio --name=v --size=256m --ioengine={engine} --direct={direct} \
                 --rw={order} --bs={size} --iodepth=8 --verify=crc32c --do_verify=1 \
                 --verify_fatal=1 --fsync=1000"
            );
            let mount = format!("{way}:/vol");
            let args = [
                "exec",
                "--explain",
                "--mount",
                &mount,
                "--",
                "/bin/sh",
                "-c",
                &script,
            ];
            let output = world.bafs_command(&args).output()?;
            let told = printed_text(&output);
            ensure!(output.status.success(), "{engine} {order}, {way}: {told}");
            ensure!(told.contains(&format!(": {way}")), "{way}: {told}");
        }
    }
    Ok(())
}
