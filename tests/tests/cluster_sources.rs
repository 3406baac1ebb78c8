//! What jobs see of their sources: all names, whatever bytes they are, the attributes of the top,
//! what the home may not read. What a volume does not have is told to whoever runs the workflow.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};
use tempfile::TempDir;

/// Names in Latin-1, with bytes that are nowhere text, and two that a careless text would mix up.
const BYTE_NAMES: [&[u8]; 5] = [
    b"plain",
    b"\xe9chantillon",
    b"\xff\xfe",
    b"\xc3\xa9t\xc3\xa9",
    b"\xee\xbf\xa9chantillon",
];

/// An ordinary user.
const USER_ID: u32 = 12_345;

fn path_with_bytes(directory: &Path, name: &[u8]) -> PathBuf {
    directory.join(OsStr::from_bytes(name))
}

/// A directory with a file of each name, below a directory of such a name too.
fn write_files(directory: &Path) -> Result<()> {
    for below in [directory.to_owned(), path_with_bytes(directory, b"d\xe9")] {
        std::fs::create_dir_all(&below)?;
        for name in BYTE_NAMES {
            std::fs::write(path_with_bytes(&below, name), [name, b"\n"].concat())?;
        }
    }
    Ok(())
}

/// Runs a workflow on a throw-away cluster, in a directory that its home shows.
fn run_workflow(directory: &Path, workflow: &str) -> Result<Output> {
    let path = directory.join("test.bafs");
    std::fs::write(&path, workflow)?;
    let mut command = Command::new(bafs_program());
    command.args(["run", "--local", "1", "--json"]).arg(&path);
    Ok(command.stdin(Stdio::null()).output()?)
}

/// The warnings of a run that is complete.
fn run_warnings(output: &Output) -> Result<Vec<String>> {
    ensure!(output.status.success(), "{}", printed_text(output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let warnings = report["warnings"].as_array().context("an array")?;
    let warnings = warnings.iter().filter_map(|it| it.as_str());
    Ok(warnings.map(str::to_owned).collect())
}

/// Runs a workflow as above as an ordinary user, who may use a /dev/fuse of its own.
fn run_workflow_as_user(directory: &Path, workflow: &str) -> Result<Output> {
    if !nix::unistd::geteuid().is_root() {
        return run_workflow(directory, workflow);
    }
    let path = directory.join("test.bafs");
    std::fs::write(&path, workflow)?;
    let copy = directory.join("bafs");
    std::fs::copy(bafs_program(), &copy)?;
    // Seen by nobody else, and gone with the last process in it.
    let script = "test \"$(stat -c %a /dev/fuse)\" = 666 || \
                  { mknod -m 666 \"$1/fuse\" c 10 229 && mount --bind \"$1/fuse\" /dev/fuse; }; \
                  exec setpriv --reuid \"$2\" --regid \"$2\" --clear-groups \
                  \"$1/bafs\" run --local 1 --json \"$1/test.bafs\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]);
    command.arg(directory).arg(USER_ID.to_string());
    command.env("TMPDIR", directory).env("HOME", directory);
    Ok(command.stdin(Stdio::null()).output()?)
}

fn create_directory(name: &str) -> Result<Option<TempDir>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let directory = tempfile::tempdir()?;
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755))?;
    Ok(Some(directory))
}

#[test]
fn cluster_shows_source_names_to_jobs_unchanged() -> Result<()> {
    let Some(home) = create_directory("cluster_shows_source_names_to_jobs_unchanged")? else {
        return Ok(());
    };
    let home = home.path();
    write_files(&home.join("in"))?;
    let job = |name: &str, at: &str| {
        format!(
            "job {name} {{\nexecutable = /bin/sh\n\
             arguments = -c 'cd {at} && find . -type f -exec cat {{}} + | LC_ALL=C sort \
             > /w/{name} && find . | LC_ALL=C sort >> /w/{name}'\n}}\n\
             mount w {name} /w\nmount {} {name} {at}\nextract w {name} bafs://home/{name}\n",
            &at[1..],
        )
    };
    let text = format!(
        "volume w scratch 1 MB\nvolume c cache bafs://home/in 1 MB\n\
         volume f scratch 1 MB from bafs://home/in\nvolume n cache file://{}/in 1 MB\n\
         {}{}{}parent j1 child j2\nparent j2 child j3\n",
        home.display(),
        job("j1", "/c"),
        job("j2", "/f"),
        job("j3", "/n"),
    );
    let homes = home.join("homes.toml");
    std::fs::write(
        &homes,
        format!("[[home]]\nurl = \"file://{}\"\n", home.display()),
    )?;
    std::fs::set_permissions(&homes, PermissionsExt::from_mode(0o600))?;
    let workflow = home.join("test.bafs");
    std::fs::write(&workflow, text)?;
    let mut command = Command::new(bafs_program());
    command
        .args(["run", "--local", "1", "--json"])
        .arg(&workflow);
    command.env("BAFS_HOMES", &homes).stdin(Stdio::null());
    let told = run_warnings(&command.output()?)?;
    ensure!(told.is_empty(), "{told:?}");
    let script = "find . -type f -exec cat {} + | LC_ALL=C sort; find . | LC_ALL=C sort";
    let mut plain = Command::new("sh");
    plain.args(["-c", script]).current_dir(home.join("in"));
    let plain = plain.output()?.stdout;
    ensure!(plain.len() > 100);
    for job in ["j1", "j2", "j3"] {
        let found = std::fs::read(home.join(job))?;
        ensure!(found == plain, "{job}: {}", String::from_utf8_lossy(&found));
    }
    Ok(())
}

#[test]
fn cluster_copies_and_sends_files_whatever_their_names() -> Result<()> {
    let world = TestCluster::start(&["50MB", "50MB"])?;
    world.wait_for_servers(3)?;
    write_files(&world.home.path().join("in"))?;
    let create = |name: &str, kind: &str, url: &OsStr| -> Result<()> {
        let args = ["volume", "create", name, "--node", "n1", "--size", "1MB"];
        let made = world.bafs_command(&args).arg(kind).arg(url).output()?;
        ensure!(made.status.success(), "{}", printed_text(&made));
        Ok(())
    };
    create("v", "--from", OsStr::new("bafs://home/in"))?;
    world.run_json(&["volume", "replicate", "v", "--to", "n2"])?;
    let listed = world.run_json(&["volume", "list"])?;
    let copies = listed.as_array().context("an array")?.iter();
    let copies: Vec<_> = copies.filter(|it| it["name"] == "v").collect();
    ensure!(copies.len() == 2, "{listed}");
    // 5 files twice, one directory.
    for copy in &copies {
        ensure!(copy["used_files"] == 11, "{copy}");
        let id = copy["id"].as_str().context("an id")?;
        for name in BYTE_NAMES {
            let path = path_with_bytes(Path::new(OsStr::from_bytes(b"d\xe9")), name);
            let target = [b"bafs://home/out/\xe0/", name].concat();
            let mut extract = world.bafs_command(&["volume", "extract", id]);
            extract.arg(path).arg(OsStr::from_bytes(&target));
            let sent = extract.output()?;
            ensure!(sent.status.success(), "{}", printed_text(&sent));
            let file = path_with_bytes(&world.home.path().join("out"), &[b"\xe0/", name].concat());
            ensure!(std::fs::read(&file)? == [name, b"\n"].concat());
            std::fs::remove_file(file)?;
        }
    }
    // One file, and a part of it that is warmed.
    create(
        "one",
        "--cache",
        OsStr::from_bytes(b"bafs://home/in/\xff\xfe"),
    )?;
    create("all", "--cache", OsStr::new("bafs://home/in"))?;
    let mut warm = world.bafs_command(&["volume", "warm", "all", "--wait", "--path"]);
    let warmed = warm
        .arg(OsStr::from_bytes(b"d\xe9/\xe9chantillon"))
        .output()?;
    ensure!(warmed.status.success(), "{}", printed_text(&warmed));
    let missing = world
        .bafs_command(&[
            "volume",
            "extract",
            copies[0]["id"].as_str().context("an id")?,
        ])
        .arg(OsStr::from_bytes(b"no\xe9"))
        .arg("bafs://home/no")
        .output()?;
    let told = printed_text(&missing);
    ensure!(told.contains("no\\xE9"), "{told}");
    Ok(())
}

#[test]
fn cluster_warns_of_omitted_files() -> Result<()> {
    let Some(home) = create_directory("cluster_warns_of_omitted_files")? else {
        return Ok(());
    };
    let home = home.path();
    std::fs::create_dir_all(home.join("in"))?;
    std::fs::write(home.join("in/a"), "a")?;
    let fifo = Command::new("mkfifo")
        .arg(path_with_bytes(&home.join("in"), b"p\xe9"))
        .status()?;
    ensure!(fifo.success());
    let deep = home.join("in").join(vec!["x".repeat(200); 19].join("/"));
    std::fs::create_dir_all(&deep)?;
    // Deeper than any path names at once.
    let script = "n=$(printf '%0200d' 0); mkdir $n && cd $n && mkdir $n && echo deep > $n/f";
    let mut deeper = Command::new("sh");
    let made = deeper.args(["-c", script]).current_dir(&deep).status()?;
    ensure!(made.success());
    let text = "volume w scratch 1 MB\nvolume c cache bafs://home/in 1 MB\n\
                volume f scratch 1 MB from bafs://home/in\n\
                job j {\nexecutable = /bin/sh\narguments = -c 'cat /c/a /f/a > /w/o'\n}\n\
                mount w j /w\nmount c j /c\nmount f j /f\nextract w o bafs://home/o\n";
    let told = run_warnings(&run_workflow(home, text)?)?;
    for volume in ["'c'", "'f'"] {
        for what in ["'p\\xE9': it is a FIFO", "longer than 4095 bytes"] {
            let count = told
                .iter()
                .filter(|it| it.contains(volume) && it.contains(what));
            ensure!(count.count() == 1, "{volume}, {what}: {told:?}");
        }
    }
    Ok(())
}

#[test]
fn cluster_runs_jobs_beside_unreadable_directories() -> Result<()> {
    let name = "cluster_runs_jobs_beside_unreadable_directories";
    let Some(home) = create_directory(name)? else {
        return Ok(());
    };
    let home = home.path();
    let closed = home.join("db/lost+found");
    std::fs::create_dir_all(&closed)?;
    std::fs::write(closed.join("inside"), "secret")?;
    std::fs::write(home.join("db/seq"), "data")?;
    std::fs::write(home.join("db/private"), "secret")?;
    let text = "volume w scratch 1 MB\nvolume c cache bafs://home/db 1 MB\n\
                volume f scratch 1 MB from bafs://home/db\n\
                job j {\nexecutable = /bin/sh\narguments = -c '\
                for v in /c /f; do cat $v/seq; ls -d $v/lost+found; ls $v/lost+found; \
                ls $v/lost+found/inside; cat $v/private; done > /w/o 2>&1; true'\n}\n\
                mount w j /w\nmount c j /c\nmount f j /f\nextract w o bafs://home/o\n";
    if nix::unistd::geteuid().is_root() {
        for path in ["", "db", "db/seq"] {
            let path = home.join(path);
            std::os::unix::fs::chown(path, Some(USER_ID), Some(USER_ID))?;
        }
    }
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o700))?;
    std::fs::set_permissions(home.join("db/private"), PermissionsExt::from_mode(0o600))?;
    if !nix::unistd::geteuid().is_root() {
        std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o0))?;
        std::fs::set_permissions(home.join("db/private"), PermissionsExt::from_mode(0o0))?;
    }
    let output = run_workflow_as_user(home, text)?;
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o700))?;
    let told = run_warnings(&output)?;
    let about = |volume: &str, path: &str| {
        let is_it = |it: &&String| it.contains(volume) && it.contains(path);
        told.iter().filter(is_it).count()
    };
    ensure!(about("'c'", "'lost+found'") == 1, "{told:?}");
    ensure!(about("'f'", "'lost+found'") == 1, "{told:?}");
    ensure!(about("'f'", "'private'") == 1, "{told:?}");
    let found = std::fs::read_to_string(home.join("o"))?;
    for volume in ["/c", "/f"] {
        ensure!(
            found.contains(&format!("data{volume}/lost+found\n")),
            "{found}"
        );
        for path in ["lost+found", "lost+found/inside", "private"] {
            let mut lines = found.lines();
            let path = format!("{volume}/{path}");
            let is_denied =
                |line: &str| line.contains(&path) && line.ends_with("Permission denied");
            ensure!(lines.any(is_denied), "{path}: {found}");
        }
    }
    Ok(())
}

#[test]
fn cluster_cache_root_has_its_sources_attributes() -> Result<()> {
    let Some(home) = create_directory("cluster_cache_root_has_its_sources_attributes")? else {
        return Ok(());
    };
    let home = home.path();
    let source = home.join("in");
    std::fs::create_dir(&source)?;
    std::fs::write(source.join("one"), "1")?;
    std::fs::set_permissions(source.join("one"), PermissionsExt::from_mode(0o640))?;
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o751))?;
    let text = "volume w scratch 1 MB\nvolume c cache bafs://home/in 1 MB\n\
                volume f scratch 1 MB from bafs://home/in\n\
                volume o cache bafs://home/in/one 1 MB\n\
                job j {\nexecutable = /bin/sh\narguments = -c '\
                stat -c \"%a %y\" /c /f /o /o/one > /w/r; cp -a /c/. /w/ && \
                echo more > /w/new'\n}\n\
                mount w j /w\nmount c j /c\nmount f j /f\nmount o j /o\n\
                extract w r bafs://home/r\nextract w new bafs://home/new\n";
    let output = run_workflow(home, text)?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let mut plain = Command::new("stat");
    plain
        .args(["-c", "%a %y"])
        .arg(&source)
        .arg(source.join("one"));
    let plain = String::from_utf8(plain.output()?.stdout)?;
    let [top, file] = plain.lines().collect::<Vec<_>>()[..] else {
        anyhow::bail!("{plain}");
    };
    // Around a file there is nothing at home that was granted: whoever reads it may list it.
    let around = file.replacen("640", "750", 1);
    let found = std::fs::read_to_string(home.join("r"))?;
    let found: Vec<_> = found.lines().collect();
    ensure!(found == [top, top, &around, file], "{found:?}, but {plain}");
    ensure!(std::fs::metadata(&source)?.mode() & 0o777 == 0o751);
    Ok(())
}

#[test]
fn cluster_cache_root_survives_invalidation_and_restart() -> Result<()> {
    let name = "cluster_cache_root_survives_invalidation_and_restart";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let mut world = TestCluster::start(&["50MB"])?;
    world.wait_for_servers(2)?;
    world.write_home("in/a", b"a")?;
    let top = world.home.path().join("in");
    let change = |mode: u32, date: &str| -> Result<()> {
        std::fs::set_permissions(&top, PermissionsExt::from_mode(mode))?;
        let touched = Command::new("touch")
            .args(["-d", date])
            .arg(&top)
            .status()?;
        ensure!(touched.success());
        Ok(())
    };
    let check = |world: &TestCluster, expected: &str| -> Result<()> {
        let stat = ["stat", "-c", "%a %Y %X %Z", "/c"];
        let args = [&["exec", "--mount", "c:/c:ro", "--"], &stat[..]].concat();
        let output = world.bafs_command(&args).output()?;
        let found = String::from_utf8_lossy(&output.stdout);
        ensure!(
            found.trim() == expected,
            "{expected}: {}",
            printed_text(&output)
        );
        Ok(())
    };
    change(0o710, "@1000000000")?;
    world.run_json(&[
        "volume",
        "create",
        "c",
        "--node",
        "n1",
        "--size",
        "1MB",
        "--cache",
        "bafs://home/in",
    ])?;
    check(&world, "710 1000000000 1000000000 1000000000")?;
    change(0o755, "@1100000000")?;
    check(&world, "710 1000000000 1000000000 1000000000")?;
    world.run_json(&["volume", "invalidate", "c"])?;
    check(&world, "755 1100000000 1100000000 1100000000")?;
    world.cluster.kill("n1")?;
    world.cluster.restart("n1")?;
    world.wait_for_servers(2)?;
    check(&world, "755 1100000000 1100000000 1100000000")
}
