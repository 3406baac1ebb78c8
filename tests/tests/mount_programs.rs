//! Unmodified programs on real mounts of a scratch and a cache volume, through `bafs exec`.

use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::{
    TestCluster, mount_obstacle, mounts_matching, printed_text, processes_matching, report_skip,
};

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(&["300MB"])?;
    world.wait_for_servers(2)?;
    world.run_json(&[
        "volume", "create", "v", "--node", "n1", "--size", "100MB", "--files", "20000",
    ])?;
    Ok(Some(world))
}

/// Runs a shell script with the volume `v` at `/vol`, a path that the host does not have.
fn run_script(world: &TestCluster, script: &str) -> Result<Output> {
    let args = ["exec", "--mount", "v:/vol", "--", "/bin/sh", "-ec", script];
    world.bafs_command(&args).output().context("bafs exec runs")
}

fn check_script(world: &TestCluster, script: &str, expected: &str) -> Result<()> {
    let output = run_script(world, script)?;
    ensure!(
        output.status.success(),
        "{script}: {}",
        printed_text(&output)
    );
    let found = String::from_utf8_lossy(&output.stdout);
    ensure!(
        found.trim() == expected.trim(),
        "{script}: {}",
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn mount_runs_ordinary_programs() -> Result<()> {
    let Some(world) = start_cluster("mount_runs_ordinary_programs")? else {
        return Ok(());
    };
    check_script(
        &world,
        "echo one > /vol/a; echo two >> /vol/a; cat /vol/a",
        "one\ntwo",
    )?;
    check_script(
        &world,
        "mkdir -p /vol/d/e; mv /vol/a /vol/d/e/b; ls /vol /vol/d",
        "/vol:\nd\n\n/vol/d:\ne",
    )?;
    check_script(
        &world,
        "cd /vol; ln -s d/e/b s; ln d/e/b h; cat s h; stat -c %h h",
        "one\ntwo\none\ntwo\n2",
    )?;
    check_script(
        &world,
        "cd /vol; exec 3>u; rm u; echo x >&3; ls u 2>&1 || true; ls -a | grep -c fuse || true",
        "ls: cannot access 'u': No such file or directory\n0",
    )?;
    check_script(
        &world,
        "cd /vol; truncate -s 1G sparse; stat -c %s sparse; rm sparse",
        "1073741824",
    )?;
    check_script(
        &world,
        "cd /vol; cp /bin/echo run; ./run from the mount",
        "from the mount",
    )?;
    check_script(
        &world,
        "cd /vol; seq 1 1000 > n; sort -rn n | head -1; awk '{s+=$1} END {print s}' n",
        "1000\n500500",
    )?;
    check_script(
        &world,
        "cd /vol; mkdir t; cd t; for i in $(seq 1 500); do echo $i > f$i; done; ls | wc -l; \
         cd ..; tar cf t.tar t; mkdir o; tar xf t.tar -C o; \
         diff -r t o/t && echo same; rm -r t o t.tar",
        "500\nsame",
    )
}

#[test]
fn mount_runs_git() -> Result<()> {
    let Some(world) = start_cluster("mount_runs_git")? else {
        return Ok(());
    };
    let script = "cd /vol; export HOME=/vol GIT_CONFIG_GLOBAL=/vol/gitconfig; \
        git config --global user.email a@b.c; git config --global user.name n; \
        git config --global init.defaultBranch main; git init -q r; cd r; \
        for i in 1 2 3; do seq $i 1000 > f$i; git add .; git commit -qm c$i; done; \
        git gc -q; git fsck --strict 2>&1; git clone -q . ../c; git -C ../c log --oneline | wc -l";
    check_script(&world, script, "3")
}

#[test]
fn mount_runs_sqlite() -> Result<()> {
    let Some(world) = start_cluster("mount_runs_sqlite")? else {
        return Ok(());
    };
    for mode in ["delete", "wal"] {
        let script = format!(
            "cd /vol; rm -f db*; sqlite3 db 'pragma journal_mode={mode}; create table t(a); \
             with recursive n(i) as (select 1 union all select i+1 from n where i<20000) \
             insert into t select i from n; select sum(a) from t; pragma integrity_check;'"
        );
        check_script(&world, &script, &format!("{mode}\n200010000\nok"))?;
    }
    Ok(())
}

#[test]
fn mount_runs_blast_tools() -> Result<()> {
    let Some(world) = start_cluster("mount_runs_blast_tools")? else {
        return Ok(());
    };
    let script = "cd /vol; cp /usr/share/doc/hmmer/examples/tutorial/globins45.fa g.fa; \
        makeblastdb -in g.fa -dbtype prot -out db >/dev/null; \
        blastp -db db -query g.fa -outfmt 6 -evalue 1e-5 | cksum; \
        cd /tmp; mkdir $$; cd $$; cp /vol/g.fa .; \
         makeblastdb -in g.fa -dbtype prot -out db >/dev/null; \
        blastp -db db -query g.fa -outfmt 6 -evalue 1e-5 | cksum; cd ..; rm -r $$";
    let output = run_script(&world, script)?;
    ensure!(output.status.success(), printed_text(&output));
    let sums: Vec<_> = output
        .stdout
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .collect();
    ensure!(
        sums.len() == 2 && sums[0] == sums[1],
        "results differ: {}",
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn mount_keeps_the_limit() -> Result<()> {
    let Some(world) = start_cluster("mount_keeps_the_limit")? else {
        return Ok(());
    };
    world.run_json(&[
        "volume", "create", "w", "--node", "n1", "--size", "1MB", "--files", "5",
    ])?;
    let script = "head -c 3000000 /dev/zero > /w/big && echo fits; \
        test $(stat -c %s /w/big) -le 1000000 && echo bounded; rm /w/big; \
        for i in 1 2 3 4 5 6; do touch /w/f$i || echo refused $i; done; \
         df --output=itotal /w | tail -1";
    let args = ["exec", "--mount", "w:/w", "--", "/bin/sh", "-c", script];
    let output = world.bafs_command(&args).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        text.starts_with("bounded\nrefused 6\n"),
        printed_text(&output)
    );
    ensure!(
        printed_text(&output).contains("No space left on device"),
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn mount_shows_a_cache_read_only() -> Result<()> {
    let Some(world) = start_cluster("mount_shows_a_cache_read_only")? else {
        return Ok(());
    };
    let big: Vec<u8> = (0..3_000_001u32)
        .flat_map(|i| (i % 251).to_le_bytes())
        .collect();
    world.write_home("data/sub/big", &big)?;
    world.write_home("data/empty", b"")?;
    std::os::unix::fs::symlink("sub/big", world.home.path().join("data/link"))?;
    let create = ["volume", "create", "c", "--node", "n1", "--size", "20MB"];
    world.run_json(&[&create[..], &["--cache", "bafs://home/data"]].concat())?;
    let script = "cd /c; find . | sort; cksum < sub/big; cksum < link; wc -c < empty; \
        echo x > new || echo no writing; rm sub/big || echo no removing; \
        cat nothing || cat nothing || echo absent; stat -c %s sub/big";
    let args = ["exec", "--mount", "c:/c", "--", "/bin/sh", "-c", script];
    let output = world.bafs_command(&args).output()?;
    let file = world.home.path().join("data/sub/big");
    let sum = std::process::Command::new("sh")
        .args(["-c", "cksum < $0"])
        .arg(&file)
        .output()?;
    let sum = String::from_utf8_lossy(&sum.stdout).trim().to_owned();
    let expected = format!(
        ".\n./empty\n./link\n./sub\n./sub/big\n{sum}\n{sum}\n0\n\
         no writing\nno removing\nabsent\n{}\n",
        big.len()
    );
    ensure!(
        String::from_utf8_lossy(&output.stdout) == expected,
        printed_text(&output)
    );
    ensure!(
        printed_text(&output).contains("Read-only file system"),
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn mount_passes_on_the_exit_status() -> Result<()> {
    let Some(world) = start_cluster("mount_passes_on_the_exit_status")? else {
        return Ok(());
    };
    for (script, code) in [
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -TERM $$", 143),
        ("exit 75", 75),
    ] {
        let output = run_script(&world, script)?;
        ensure!(
            output.status.code() == Some(code),
            "{script}: {}",
            printed_text(&output)
        );
    }
    let missing = world
        .bafs_command(&["exec", "--mount", "v:/vol", "--", "/no/such"])
        .output()?;
    ensure!(missing.status.code() == Some(127), printed_text(&missing));
    let data = world
        .bafs_command(&["exec", "--mount", "v:/vol", "--", "/etc/passwd"])
        .output()?;
    ensure!(data.status.code() == Some(126), printed_text(&data));
    let overlap = world
        .bafs_command(&[
            "exec",
            "--mount",
            "v:/vol",
            "--mount",
            "v:/vol",
            "--",
            "/bin/true",
        ])
        .output()?;
    ensure!(!overlap.status.success(), "two mounts on one path");
    Ok(())
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the promise is about real seconds"
)]
fn mount_ends_jobs_of_a_lost_volume() -> Result<()> {
    let Some(world) = start_cluster("mount_ends_jobs_of_a_lost_volume")? else {
        return Ok(());
    };
    let marker = format!("{}", 86_400 + std::process::id());
    let script =
        format!("setsid sleep {marker} & trap '' TERM; echo started > /vol/s; sleep {marker}");
    let mut command =
        world.bafs_command(&["exec", "--mount", "v:/vol", "--", "/bin/sh", "-c", &script]);
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let job = command.spawn()?;
    let slept = format!("sleep {marker}");
    for _ in 0..200 {
        if processes_matching(&slept).len() >= 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    world.run_json(&["volume", "delete", "v"])?;
    let deleted = Instant::now();
    let output = job.wait_with_output()?;
    let took = deleted.elapsed();
    ensure!(output.status.code() == Some(75), printed_text(&output));
    ensure!(
        String::from_utf8_lossy(&output.stderr).contains("VolumeLost"),
        printed_text(&output)
    );
    ensure!(
        took < Duration::from_secs(4),
        "the job ended only after {took:?}"
    );
    ensure!(processes_matching(&slept).is_empty(), "processes are left");
    Ok(())
}

#[test]
fn mount_leaves_nothing_when_the_agent_is_killed() -> Result<()> {
    let Some(world) = start_cluster("mount_leaves_nothing_when_the_agent_is_killed")? else {
        return Ok(());
    };
    // Other tests may have mounts of their own on the host.
    let volume = format!("left{}", std::process::id());
    world.run_json(&["volume", "create", &volume, "--node", "n1", "--size", "1MB"])?;
    let marker = format!("{}", 172_800 + std::process::id());
    let script = format!("setsid sleep {marker} & sleep {marker}");
    let mounted = format!("{volume}:/vol");
    let mut job = world
        .bafs_command(&["exec", "--mount", &mounted, "--", "/bin/sh", "-c", &script])
        .spawn()?;
    let slept = format!("sleep {marker}");
    for _ in 0..200 {
        if processes_matching(&slept).len() >= 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    job.kill()?;
    job.wait()?;
    for _ in 0..40 {
        if processes_matching(&slept).is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(processes_matching(&slept).is_empty(), "processes are left");
    let left = mounts_matching(&format!("bafs:{volume}"));
    ensure!(left.is_empty(), "mounts are left: {left:?}");
    Ok(())
}
