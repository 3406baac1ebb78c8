//! What the cooperative cache fetches of files that programs map into memory.

use std::path::Path;

use anyhow::{Result, ensure};
use bafs_proto::message::JobOutcome;
use bafs_tests::api::{CacheSpec, CacheVolume};
use bafs_tests::cache_cluster::{CacheCluster, DATA_FILE};
use bafs_tests::content::Content;
use bafs_tests::{mount_obstacle, report_skip};

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// Touches bytes of a mapped file here and there.
const TOUCH_SCRIPT: &str = r#"
import mmap, os, random, sys
file = os.open("/data/NAME", os.O_RDONLY)
size = os.fstat(file).st_size
at = random.Random(7)
places = [at.randrange(size) for _ in range(60)]
with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory:
    touched = bytes(memory[place] for place in places)
with open("ORIGINAL", "rb") as original:
    whole = original.read()
if touched != bytes(whole[place] for place in places):
    sys.exit("other bytes")
print(len({place // 65536 for place in places}))
"#;

/// Reads large pieces from odd places of a file, then goes through it in mapped memory from its
/// middle on, then reads all of it.
const READ_THROUGH_SCRIPT: &str = r#"
import mmap, os, random, sys
with open("ORIGINAL", "rb") as original:
    whole = original.read()
file = os.open("/data/NAME", os.O_RDONLY)
at = random.Random(8)
for length in [131072, 1 << 20, 3 << 20] * 5:
    place = at.randrange(len(whole) // 4096) * 4096
    if os.pread(file, length, place) != whole[place:place + length]:
        sys.exit("other bytes at %d" % place)
begin = len(whole) // 2 + 5 * 4096
with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory:
    for place in range(begin, len(whole), 4096):
        if memory[place] != whole[place]:
            sys.exit("another byte at %d" % place)
    if bytes(memory) != whole:
        sys.exit("other bytes")
print("same")
"#;

/// Runs a script of Python in a job on the volume, and returns what it prints.
fn run_python(
    stage: &CacheCluster,
    volume: &CacheVolume,
    script: &str,
    original: &Path,
) -> Result<String> {
    let script = script.replace("NAME", DATA_FILE);
    let script = script.replace("ORIGINAL", &original.to_string_lossy());
    let (api_client, script) = (stage.client.client(), format!("python3 -c '{script}'"));
    let started = api_client.start_job(&volume.node, volume.mount_target(), &script);
    let job = stage.client.block_on(started)?;
    let report = stage
        .client
        .block_on(api_client.wait_for_job(&volume.node, job))?;
    ensure!(
        report.outcome == JobOutcome::Exited(0),
        "{:?}: {}",
        report.outcome,
        report.output_tail
    );
    Ok(report.output_tail.trim().to_owned())
}

#[test]
fn cluster_cache_fetches_only_touched_mapped_pages() -> Result<()> {
    let name = "cluster_cache_fetches_only_touched_mapped_pages";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    // Blocks are 64 KiB only where the source is large enough.
    let content = Content::new(6, 96 * MIB);
    let stage = CacheCluster::start(1, "200MB", None)?;
    stage.write_data_set("mapped", &content)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("mapped", 128 << 20),
    )?;
    let original = stage
        .test_cluster
        .home
        .path()
        .join("mapped")
        .join(DATA_FILE);
    let touched: usize = run_python(&stage, &volumes[0], TOUCH_SCRIPT, &original)?.parse()?;
    let sent = stage.read_home_bytes()?;
    // One window may begin where a block does, or go on where another one ended.
    let most = (touched * BLOCK_BYTES + 6 * MIB) as u64;
    ensure!(
        sent <= most,
        "home sent {sent} bytes for {touched} blocks of {BLOCK_BYTES}"
    );
    // What was refused around those pages is there for whoever wants it.
    let read = run_python(&stage, &volumes[0], READ_THROUGH_SCRIPT, &original)?;
    ensure!(read == "same", "{read}");
    let (sent, all) = (stage.read_home_bytes()?, content.bytes().len() as u64);
    ensure!(sent == all, "home sent {sent} bytes of {all}");
    Ok(())
}
