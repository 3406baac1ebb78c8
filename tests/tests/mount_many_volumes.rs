//! A job of more volumes than have readers of their own: the last behaves as the first, and as a
//! plain directory.

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::start_cluster;
use bafs_tests::{find_tool, printed_text, report_skip};

/// Volumes of the job.
const VOLUME_COUNT: usize = 10;

/// Does in directory `$1` what directories do, and prints all that should be the same everywhere.
const SCRIPT: &str = r#"
work() {
  cd "$1"; mkdir d; echo hi > d/a; ln d/a d/b; ln -s a d/l; mv d/a d/c; mv -n d/b d/c
  truncate -s 1M d/t; fallocate -l 64K d/f; mkfifo d/p; readlink d/l
  python3 - <<'P'
import mmap, os
os.setxattr("d/b", "user.k", b"value"); print(os.getxattr("d/b", "user.k"), os.listxattr("d/b"))
os.removexattr("d/b", "user.k"); print(os.listxattr("d/b"))
with open("m", "w+b") as f:
    f.write(bytes(range(256)) * 4096); f.flush()
    with mmap.mmap(f.fileno(), 0) as m: m[5000:5005] = b"mmap!"
    f.seek(4990); print(f.read(30))
with open("hole", "wb") as f:
    f.seek(1 << 20); f.write(b"end")
f = os.open("hole", os.O_RDONLY); print(os.lseek(f, 0, os.SEEK_DATA) > 0, os.fstat(f).st_size)
try: os.mkdir("d")
except OSError as e: print(e.errno)
try: os.rmdir("d")
except OSError as e: print(e.errno)
try: os.open("none", os.O_RDONLY)
except OSError as e: print(e.errno)
P
  seq 1 300000 > big; cp big big2; cmp big big2; md5sum big big2; tail -c 50 big
  chmod 640 d/b; touch -d @1000 d/b; stat -c '%n %s %a %h %F' d/b d/t d/f d/p d; stat -c %Y d/b
  mkdir many; for n in $(seq 300); do echo $n > many/file-$n; done
  ls many | sort | md5sum; cat many/* | sort -n | md5sum; rm -r many
  (for n in 1 2 3 4; do (seq 1 100000 > par$n; md5sum < par$n) & done; wait) | sort -u
  sync; rm big2; find . | sort; cd /
}
"#;

const HOLE_REPORTED: &str = "True 1048579";
const HOLE_UNREPORTED: &str = "False 1048579";

const WRITE_BACK: &str = ":write-back";

fn check_directory_semantics(name: &str, has_fd_passing: bool, mode: &str) -> Result<()> {
    let Some(world) = start_cluster(name, "500MB")? else {
        return Ok(());
    };
    if find_tool("python3").is_none() {
        report_skip(name, "it needs python3");
        return Ok(());
    }
    let mut args = vec!["exec".to_owned(), "--explain".to_owned()];
    for number in 1..=VOLUME_COUNT {
        let volume = format!("v{number}");
        world.run_json(&[
            "volume", "create", &volume, "--node", "n1", "--size", "30MB",
        ])?;
        args.extend(["--mount".to_owned(), format!("{volume}:/w/{number}{mode}")]);
    }
    if !has_fd_passing {
        std::fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
    }
    let directory = tempfile::tempdir()?;
    let script = format!(
        "{SCRIPT} for at in {} /w/1 /w/{VOLUME_COUNT}; do echo \"== $at\"; work $at 2>&1; done",
        directory.path().display()
    );
    args.extend(["--", "/bin/bash", "-c", &script].map(str::to_owned));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = world.bafs_command(&args).output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains("share their readers"),
        printed_text(&output)
    );
    let text = String::from_utf8(output.stdout)?;
    let parts: Vec<&str> = text.split("== ").skip(1).collect();
    let of = |at: usize| {
        let part = parts.get(at).and_then(|part| part.split_once('\n'));
        part.map(|(_, told)| told).context("three parts")
    };
    // Where the kernel collects writes, all of a file is data.
    let plain = match mode {
        WRITE_BACK => of(0)?.replace(HOLE_REPORTED, HOLE_UNREPORTED),
        _ => of(0)?.to_owned(),
    };
    ensure!(plain.lines().count() > 30, "{text}");
    ensure!(of(0)?.contains(HOLE_REPORTED), "{text}");
    ensure!(plain == of(1)?, "own readers: {text}");
    ensure!(plain == of(2)?, "shared readers: {text}");
    Ok(())
}

#[test]
fn mount_of_shared_readers_matches_directories_inline() -> Result<()> {
    check_directory_semantics(
        "mount_of_shared_readers_matches_directories_inline",
        true,
        "",
    )
}

#[test]
fn mount_of_shared_readers_matches_directories_by_calls() -> Result<()> {
    let name = "mount_of_shared_readers_matches_directories_by_calls";
    check_directory_semantics(name, false, "")
}

#[test]
fn mount_of_shared_readers_supports_write_back() -> Result<()> {
    let name = "mount_of_shared_readers_supports_write_back";
    check_directory_semantics(name, false, WRITE_BACK)
}
