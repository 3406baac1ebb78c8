//! Volumes whose writes the kernel collects (write-back): that it does, that all of it arrives, the
//! limit, and the death of every side. On the volume's node and over the network.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_tests::exec_job::{self, ExecJob};
use bafs_tests::mounted_volume::{DataPath, MountedVolume, WRITE_BACK_MESSAGE};
use bafs_tests::{TestCluster, mount_obstacle, mounts_matching, printed_text, report_skip, uring};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const INLINE_MESSAGE: &str = "volume v: inline";
const CALLS_MESSAGE: &str = "volume v: calls";

const EXT4_MAGIC: i64 = 0xef53;

/// A node with a volume `v` of 50 MB, and the way in which jobs reach it.
struct WriteBackCluster {
    world: TestCluster,
    expected_path: &'static str,
}

impl WriteBackCluster {
    /// One for each way; none where the test must skip itself.
    fn start_each(test: &str) -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for way in [INLINE_MESSAGE, CALLS_MESSAGE] {
            let Some(world) = exec_job::start_cluster(test, "300MB")? else {
                break;
            };
            if way == CALLS_MESSAGE {
                fs::remove_file(
                    world
                        .cluster
                        .directory()
                        .join("n1")
                        .join(HANDOFF_SOCKET_NAME),
                )?;
            }
            let create = ["volume", "create", "v", "--node", "n1", "--size", "50MB"];
            world.run_json(&create)?;
            all.push(Self {
                world,
                expected_path: way,
            });
        }
        Ok(all)
    }

    fn job_command(&self, script: &str) -> Command {
        exec_job::job_command_with_mount(&self.world, "v:/vol:write-back", &[], script)
    }

    /// Runs a job whose writes are collected.
    fn check_write_back(&self, script: &str, expected: &str) -> Result<()> {
        exec_job::check_command(
            self.job_command(script),
            self.expected_path,
            script,
            expected,
        )
    }

    /// Runs a job whose writes are not, on what an earlier one has left.
    fn check_without_write_back(&self, script: &str, expected: &str) -> Result<()> {
        exec_job::check_job(&self.world, &[], self.expected_path, script, expected)
    }
}

fn start_mounted_volumes(test: &str) -> Result<Vec<MountedVolume>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(Vec::new());
    }
    let mut stands = vec![MountedVolume::start(DataPath::WriteBack)?];
    if uring::can_use_rings(test) {
        stands.push(MountedVolume::start(DataPath::WriteBackRing)?);
    }
    Ok(stands)
}

#[test]
fn mount_write_back_flushes_at_fsync_and_close() -> Result<()> {
    for stand in start_mounted_volumes("mount_write_back_flushes_at_fsync_and_close")? {
        let mounted = stand.in_process_mount().context("it is served here")?;
        let written = || mounted.volume().usage().written_bytes;
        let path = stand.path().join("f");
        let mut file = File::create(&path)?;
        for _ in 0..1_000 {
            file.write_all(b"x")?;
        }
        ensure!(written() == 0, "{} bytes came at once", written());
        // The kernel knows all of it, whatever the volume has.
        let other = File::open(&path)?;
        ensure!(fs::metadata(&path)?.len() == 1_000 && other.metadata()?.len() == 1_000);
        ensure!(fs::read(&path)? == [b'x'; 1_000]);
        file.sync_all()?;
        ensure!(written() == 1_000, "{} came with fsync", written());
        file.write_all(b"yz")?;
        ensure!(written() == 1_000);
        drop(file);
        ensure!(written() > 1_000, "nothing came with close");
        ensure!(fs::metadata(&path)?.len() == 1_002);
    }
    Ok(())
}

#[test]
fn mount_write_back_keeps_names_sizes_and_times() -> Result<()> {
    for stand in start_mounted_volumes("mount_write_back_keeps_names_sizes_and_times")? {
        let (old, new) = (stand.path().join("old"), stand.path().join("new"));
        let mut file = File::create(&old)?;
        file.write_all(&[1; 10_000])?;
        // What was not sent yet goes with its file.
        fs::rename(&old, &new)?;
        file.write_at(b"tail", 9_998)?;
        file.set_len(10_001)?;
        ensure!(fs::metadata(&new)?.len() == 10_001);
        let read = fs::read(&new)?;
        ensure!(read[..9_998] == [1; 9_998] && read[9_998..] == *b"tai");
        // A time that is set stays, though bytes were written before and are sent after.
        file.write_at(b"late", 0)?;
        let touched = Command::new("touch")
            .args(["-d", "@1000000000"])
            .arg(&new)
            .status()?;
        ensure!(touched.success());
        drop(file);
        ensure!(fs::metadata(&new)?.mtime() == 1_000_000_000);
        // A file of which only its end was written has no holes where there are bytes unsent.
        let file = File::create(stand.path().join("sparse"))?;
        file.write_at(b"end", 1 << 20)?;
        let copy = stand.path().join("copy");
        let copied = Command::new("cp")
            .arg("--sparse=auto")
            .args([stand.path().join("sparse"), copy.clone()])
            .status()?;
        ensure!(copied.success());
        ensure!(fs::read(copy)?.ends_with(b"\0end"));
        drop(file);
    }
    Ok(())
}

#[test]
fn mount_write_back_delivers_single_bytes() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_delivers_single_bytes")? {
        let script = "head -c 400000 /dev/urandom > /vol/a; \
            dd if=/vol/a of=/vol/b bs=1 2>/dev/null; cmp /vol/a /vol/b; echo same";
        ready.check_write_back(script, "same")?;
        ready.check_without_write_back("cmp /vol/a /vol/b; stat -c %s /vol/b", "400000")?;
    }
    Ok(())
}

#[test]
fn mount_write_back_is_announced() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_is_announced")? {
        let output = ready.job_command("true").output()?;
        ensure!(
            printed_text(&output).contains(WRITE_BACK_MESSAGE),
            printed_text(&output)
        );
        let without = exec_job::job_command(&ready.world, &[], "true").output()?;
        ensure!(
            !printed_text(&without).contains(WRITE_BACK_MESSAGE),
            printed_text(&without)
        );
    }
    Ok(())
}

#[test]
fn mount_write_back_appends_never_overwrite_each_other() -> Result<()> {
    for ready in
        WriteBackCluster::start_each("mount_write_back_appends_never_overwrite_each_other")?
    {
        let script = "cd /vol; \
            write() { i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $1; done >> f; }; \
            write one & write other & wait; sort f | uniq -c | tr -s ' '";
        ready.check_write_back(script, "3000 one\n 3000 other")?;
        ready.check_without_write_back(
            "sort /vol/f | uniq -c | tr -s ' '",
            "3000 one\n 3000 other",
        )?;
    }
    Ok(())
}

#[test]
fn mount_write_back_past_the_limit_ends_jobs() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_past_the_limit_ends_jobs")? {
        // It would go on for ever.
        let script = "cd /vol; echo kept > first; sync first; \
            dd if=/dev/zero of=f bs=1M count=80 || true; sleep 1000";
        let ended = ready.job_command(script).output()?;
        ensure!(ended.status.code() == Some(75), printed_text(&ended));
        ensure!(
            printed_text(&ended).contains("NoSpaceBytes"),
            printed_text(&ended)
        );
        // All that is shown can be read, and the limit holds. Pieces come in any order, so the file
        // may have holes where others did not fit.
        let look = "cd /vol; cat first; test $(du -sk . | cut -f1) -le 48832; \
            test $(du -sk f | cut -f1) -ge 40000; cat f | tr -d '\\0' | wc -c; rm f; ls";
        ready.check_without_write_back(look, "kept\n0\nfirst")?;
        // So does it for a program that ends before anybody has looked.
        let script = "cd /vol; dd if=/dev/zero of=f bs=1M count=80 2>/dev/null";
        let ended = ready.job_command(script).output()?;
        ensure!(ended.status.code() == Some(75), printed_text(&ended));
        ready.check_without_write_back("cd /vol; rm f; cat first", "kept")?;
    }
    Ok(())
}

#[test]
fn mount_write_back_reports_too_large_files() -> Result<()> {
    let test = "mount_write_back_reports_too_large_files";
    for ready in WriteBackCluster::start_each(test)? {
        let kind = rustix::fs::statfs(ready.world.cluster.directory())?.f_type;
        if kind != EXT4_MAGIC {
            report_skip(test, "not on ext4, whose files end at 16 TiB");
            return Ok(());
        }
        let script = "cd /vol; echo kept > first; \
            write() { dd if=/bin/sh of=f bs=4096 count=1 seek=$((1 << 32)) conv=notrunc$1; }; \
            write ,fsync 2> said && echo synced; grep -o 'File too large' said; \
            write '' 2> said && echo closed; grep -c 'closing' said; \
            echo more > f; cat first f";
        ready.check_write_back(script, "File too large\n1\nkept\nmore")?;
        ready.check_without_write_back("cat /vol/first /vol/f", "kept\nmore")?;
    }
    Ok(())
}

#[test]
fn mount_write_back_delivers_a_killed_programs_data() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_delivers_a_killed_programs_data")? {
        let script = "cd /vol; (while :; do printf abcdefgh; done > f) & \
            until [ \"$(stat -c %s f 2>/dev/null || echo 0)\" -gt 80000 ]; do sleep 0.05; done; \
            kill -9 $!; wait || true; stat -c %s f > size; \
            cat f | head -c $(($(stat -c %s f) / 8 * 8)) | sed 's/abcdefgh//g' | wc -c";
        ready.check_write_back(script, "0")?;
        ready.check_without_write_back(
            "cd /vol; test $(cat size) = $(stat -c %s f); echo all",
            "all",
        )?;
    }
    Ok(())
}

#[test]
fn mount_write_back_delivers_a_killed_jobs_data() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_delivers_a_killed_jobs_data")? {
        // Open, and not synced: nobody but the kernel has all of it.
        let script = "exec 3> /vol/f; head -c 20M /dev/zero | tr '\\0' x >&3; echo ready; \
            while :; do sleep 1; done";
        let busy = ExecJob::from_command(ready.job_command(script))?;
        busy.send_signal(Signal::SIGTERM)?;
        busy.wait_for_end()?;
        let look = "stat -c %s /vol/f; tr -d x < /vol/f | wc -c";
        ready.check_without_write_back(look, "20971520\n0")?;
    }
    Ok(())
}

#[test]
fn mount_write_back_keeps_synced_data_after_kill() -> Result<()> {
    let test = "mount_write_back_keeps_synced_data_after_kill";
    for ready in WriteBackCluster::start_each(test)? {
        let script = "cd /vol; echo kept > f; sync f; mkdir d; sync d; exec 3> g; echo lost >&3; \
            echo ready; while :; do sleep 1; done";
        let busy = ExecJob::from_command(ready.job_command(script))?;
        busy.send_signal(Signal::SIGKILL)?;
        busy.wait_for_end()?;
        ready.check_without_write_back(
            "cd /vol; cat f; ls -d d; echo more >> f; wc -l < f",
            "kept\nd\n2",
        )?;
    }
    Ok(())
}

#[test]
fn mount_write_back_on_host_flushes_at_end() -> Result<()> {
    for ready in WriteBackCluster::start_each("mount_write_back_on_host_flushes_at_end")? {
        let point = tempfile::tempdir()?;
        let at = point.path().to_str().context("text")?.to_owned();
        let mut agent = ready
            .world
            .bafs_command(&["mount", "--write-back", "v", &at])
            .spawn()?;
        for _ in 0..200 {
            if !mounts_matching(&at).is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        // A program that goes on, and has neither closed nor synced.
        let mut file = File::create(point.path().join("f"))?;
        file.write_all(&vec![b'x'; 5_000_000])?;
        kill(Pid::from_raw(i32::try_from(agent.id())?), Signal::SIGTERM)?;
        ensure!(agent.wait()?.success());
        ensure!(file.write_all(b"y").is_err() || file.sync_all().is_err());
        drop(file);
        ready.check_without_write_back(
            "tr -d x < /vol/f | wc -c; stat -c %s /vol/f",
            "0\n5000000",
        )?;
    }
    Ok(())
}
