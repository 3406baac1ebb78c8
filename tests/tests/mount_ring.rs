//! Volumes whose requests come by rings (FUSE over io_uring): every processor is answered, and no
//! end leaves a program waiting. What they do otherwise, the suites test.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::{self, ExecJob};
use bafs_tests::mounted_volume::{DataPath, MountedVolume, RING_MESSAGE};
use bafs_tests::printed_text;
use bafs_tests::uring::{self, RingSetting};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

/// Asks without end, by data and by names, until something fails.
const REQUEST_LOOP_SCRIPT: &str = "while dd if=big of=/dev/null bs=64k iflag=direct 2>/dev/null \
    && echo x > own$0 && rm own$0; do :; done; exit 7";

/// A volume with a file of 64 MB, and programs on every processor that ask it without end.
fn start_busy_volume() -> Result<(MountedVolume, Vec<Child>)> {
    let stand = MountedVolume::start(DataPath::Ring)?;
    fs::write(stand.path().join("big"), vec![1; 64_000_000])?;
    let mut programs = Vec::new();
    for number in 0..4 {
        let processor = number % std::thread::available_parallelism()?.get();
        let program = Command::new("taskset")
            .args([
                "-c",
                &processor.to_string(),
                "sh",
                "-c",
                REQUEST_LOOP_SCRIPT,
            ])
            .arg(number.to_string())
            .current_dir(stand.path())
            .stderr(Stdio::null())
            .spawn()?;
        programs.push(program);
    }
    // Each has made its file at least once when all have been seen.
    for number in 0..4 {
        let own = stand.path().join(format!("own{number}"));
        wait_until("a program asks", || own.exists())?;
    }
    Ok((stand, programs))
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    for _ in 0..6_000 {
        if holds() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    anyhow::bail!("it never happened: {what}")
}

/// All programs end by an error of their own.
fn check_all_fail(programs: Vec<Child>) -> Result<()> {
    for mut program in programs {
        let mut ended = None;
        let looked = wait_until("a program ends", || {
            ended = program.try_wait().ok().flatten();
            ended.is_some()
        });
        if looked.is_err() {
            // It waits in the kernel, where only the end of the mount reaches it.
            let _ = program.kill();
        }
        looked?;
        ensure!(ended.and_then(|it| it.code()) == Some(7), "{ended:?}");
    }
    Ok(())
}

#[test]
fn mount_by_ring_answers_programs_of_every_processor() -> Result<()> {
    let name = "mount_by_ring_answers_programs_of_every_processor";
    if !uring::can_use_rings(name) {
        return Ok(());
    }
    let stand = MountedVolume::start(DataPath::Ring)?;
    for processor in 0..std::thread::available_parallelism()?.get() {
        let script = format!(
            "head -c 3000001 /dev/urandom > a{processor}; cp a{processor} b; \
             dd if=b of=c bs=1M iflag=direct oflag=direct 2>/dev/null || cp b c; cmp a{processor} c"
        );
        let output = Command::new("taskset")
            .args(["-c", &processor.to_string(), "sh", "-ec", &script])
            .current_dir(stand.path())
            .output()?;
        ensure!(
            output.status.success(),
            "{processor}: {}",
            printed_text(&output)
        );
    }
    Ok(())
}

#[test]
fn mount_by_ring_ends_while_programs_use_it() -> Result<()> {
    if !uring::can_use_rings("mount_by_ring_ends_while_programs_use_it") {
        return Ok(());
    }
    let (stand, programs) = start_busy_volume()?;
    let at = stand.path().to_owned();
    drop(stand);
    ensure!(bafs_tests::mounts_matching(&at.to_string_lossy()).is_empty());
    check_all_fail(programs)
}

#[test]
fn mount_by_ring_ends_with_its_aborted_connection() -> Result<()> {
    if !uring::can_use_rings("mount_by_ring_ends_with_its_aborted_connection") {
        return Ok(());
    }
    let (stand, programs) = start_busy_volume()?;
    let mounted = stand.in_process_mount().context("it is served here")?;
    mounted.abort();
    check_all_fail(programs)?;
    wait_until("the mount is over", || mounted.has_ended())?;
    // The program that a mount asks whether it is dead is not here, so it would stay.
    Ok(umount2(stand.path(), MntFlags::MNT_DETACH)?)
}

/// Starts a job that asks without end, whose volume is reached by rings.
fn start_busy_job(world: &bafs_tests::TestCluster) -> Result<ExecJob> {
    let script = "cd /vol; head -c 20M /dev/zero > big; echo ready; \
        for number in 1 2 3; do (while :; do dd if=big of=/dev/null bs=64k iflag=direct; \
        echo x > own$number; rm own$number; done) 2>/dev/null & done; wait";
    ExecJob::start(world, &[], script)
}

#[test]
fn mount_by_ring_ends_with_its_killed_agent() -> Result<()> {
    let name = "mount_by_ring_ends_with_its_killed_agent";
    if !uring::can_use_rings(name) {
        return Ok(());
    }
    let Some(world) = exec_job::start_cluster(name, "300MB")? else {
        return Ok(());
    };
    let create = ["volume", "create", "v", "--node", "n1", "--size", "50MB"];
    world.run_json(&create)?;
    let mut ends = Vec::new();
    let _rings = RingSetting::enable()?;
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let busy = start_busy_job(&world)?;
        busy.send_signal(signal)?;
        let output = busy.wait_for_end()?;
        ensure!(
            printed_text(&output).contains(RING_MESSAGE),
            "{}",
            printed_text(&output)
        );
        let keeps = printed_text(&output).contains("keeps memory");
        ensure!(
            !keeps,
            "the kernel gives back all: {}",
            printed_text(&output)
        );
        ends.push(output.status);
    }
    ensure!(!ends.iter().any(|end| end.success()), "{ends:?}");
    // What waits for the disk is answered by another thread than the ring's.
    let script = "cd /vol; head -c 3000001 /dev/urandom > a; sync a; \
        dd if=a of=b bs=64k oflag=sync 2>/dev/null; cp a c; dd if=a of=d bs=1M conv=fsync \
        2>/dev/null; for one in b c d; do cmp a $one; done; sync .; echo same";
    exec_job::check_job(&world, &[], RING_MESSAGE, script, "same")
}

#[test]
fn mount_by_ring_ends_with_its_killed_process() -> Result<()> {
    let name = "mount_by_ring_ends_with_its_killed_process";
    if !uring::can_use_rings(name) {
        return Ok(());
    }
    let Some(world) = exec_job::start_cluster(name, "300MB")? else {
        return Ok(());
    };
    let create = ["volume", "create", "v", "--node", "n1", "--size", "100MB"];
    world.run_json(&create)?;
    let place = tempfile::tempdir()?;
    let at = place.path().to_string_lossy().into_owned();
    let rings = RingSetting::enable()?;
    let mut agent = world.bafs_command(&["mount", "--explain", "v", &at]);
    let mut agent = agent.stderr(Stdio::piped()).spawn()?;
    wait_until("it is mounted", || {
        !bafs_tests::mounts_matching(&at).is_empty()
    })?;
    // A first answer means that the rings are there.
    fs::metadata(place.path())?;
    drop(rings);
    fs::write(place.path().join("big"), vec![1; 20_000_000])?;
    let programs: Vec<_> = (0..3)
        .map(|number| start_request_loop(place.path(), number))
        .collect();
    wait_until("a program asks", || place.path().join("own1").exists())?;
    agent.kill()?;
    let output = agent.wait_with_output()?;
    ensure!(
        printed_text(&output).contains(RING_MESSAGE),
        "{}",
        printed_text(&output)
    );
    check_all_fail(programs.into_iter().collect::<Result<_>>()?)?;
    wait_until("the mount is gone", || {
        bafs_tests::mounts_matching(&at).is_empty()
    })
}

fn start_request_loop(at: &Path, number: u32) -> Result<Child> {
    let mut command = Command::new("sh");
    let command = command.args(["-c", REQUEST_LOOP_SCRIPT, &number.to_string()]);
    Ok(command.current_dir(at).stderr(Stdio::null()).spawn()?)
}

#[test]
fn mount_without_rings_works_and_explains_why() -> Result<()> {
    let name = "mount_without_rings_works_and_explains_why";
    if !uring::can_use_rings(name) {
        return Ok(());
    }
    let _none = RingSetting::disable()?;
    let stand = MountedVolume::start(DataPath::Inline)?;
    let way = stand
        .in_process_mount()
        .context("it is served here")?
        .transport();
    ensure!(way.contains("enable_uring is not Y"), "{way}");
    fs::write(stand.path().join("f"), "x")?;
    Ok(())
}
