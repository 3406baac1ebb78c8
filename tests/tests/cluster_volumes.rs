//! The volume API by hand, on real processes: `bafs volume …`, `bafs servers`, wrong use.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};

fn start_cluster(nodes: &[&str]) -> Result<TestCluster> {
    let world = TestCluster::start(nodes)?;
    world.wait_for_servers(nodes.len() + 1)?;
    Ok(world)
}

#[test]
fn cluster_volumes_are_created_used_and_deleted() -> Result<()> {
    let world = start_cluster(&["10MB", "10MB"])?;
    world.write_home("in/a.txt", b"hello\n")?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    let made = world.run_json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    ensure!(
        made["state"] == "ready" && made["used_files"] == 1,
        "{made}"
    );
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(shown["id"] == made["id"], "{shown}");
    let copy = world.run_json(&["volume", "replicate", "v", "--to", "n2"])?;
    ensure!(copy["node"] == "n2" && copy["used_files"] == 1, "{copy}");
    let id = copy["id"].as_str().context("an id")?;
    let receipt = world.run_json(&["volume", "extract", id, "a.txt", "bafs://home/out/b.txt"])?;
    ensure!(receipt["size"] == 6, "{receipt}");
    ensure!(
        world.read_home("out/b.txt")? == b"hello\n",
        "the file is at home"
    );
    let both = world.run_json(&["volume", "show", "v"])?;
    let both = both.as_array().context("two volumes have this name")?;
    ensure!(
        both.len() == 2 && both[0]["id"] != both[1]["id"],
        "{both:?}"
    );
    let ambiguous = world.bafs_command(&["volume", "delete", "v"]).output()?;
    ensure!(!ambiguous.status.success(), "two volumes have this name");
    ensure!(
        printed_text(&ambiguous).contains(id),
        printed_text(&ambiguous)
    );
    for id in [id, made["id"].as_str().context("an id")?] {
        world.run_json(&["volume", "delete", id])?;
    }
    ensure!(
        world
            .run_json(&["volume", "list"])?
            .as_array()
            .is_some_and(Vec::is_empty),
        "all gone"
    );
    Ok(())
}

/// A volume `v` with a file `big`, whose home is killed while the catalog still lists it.
fn start_with_dead_home() -> Result<TestCluster> {
    let mut world = start_cluster(&["20MB"])?;
    world.write_home("in/big", &[7; 3 << 20])?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "10MB"];
    world.run_json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    world.cluster.kill("home")?;
    Ok(world)
}

/// A home that exports a directory, and where it is. It ends with its standard input.
fn start_home(world: &TestCluster, export: &Path, more: &[&str]) -> Result<(Child, String)> {
    let export = export.to_string_lossy().into_owned();
    let home = [
        "--json",
        "home",
        "--until-stdin-closes",
        "--export",
        &export,
    ];
    let mut home = world.bafs_command(&[&home, more].concat());
    let mut home = home.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let stdout = home.stdout.take().context("it is piped")?;
    BufReader::new(stdout).read_line(&mut line)?;
    Ok((home, line))
}

/// Sends `big` to a home that is dead, and starts that again, somewhere else, when the command says
/// this. Whoever took its address meanwhile gets nothing. Returns what the command said after that.
fn extract_to_moved_home(word: &str) -> Result<String> {
    let world = start_with_dead_home()?;
    let extract = ["volume", "extract", "v", "big", "bafs://home/out"];
    let mut extract = world
        .bafs_command(&extract)
        .stderr(Stdio::piped())
        .spawn()?;
    let stderr = extract.stderr.take().context("it is piped")?;
    let mut lines = BufReader::new(stderr).lines();
    // It has been to the catalog when it says what it waits for.
    let waits = lines.next().context("it says nothing")??;
    ensure!(waits.contains("sends 'big' to home"), "{waits}");
    let (before, other) = (
        world.cluster.home_address().to_owned(),
        tempfile::tempdir()?,
    );
    let took = ["--name", "other", "--listen", &before];
    let (successor, at) = start_home(&world, other.path(), &took)?;
    ensure!(at.contains(&before), "{at}: not the address before");
    if !waits.contains(word) {
        let mut said = lines.by_ref().map_while(Result::ok);
        said.find(|line| line.contains(word)).context("it ended")?;
    }
    let (home, at) = start_home(&world, world.home.path(), &[])?;
    ensure!(!at.contains(&before), "{at} is the address before");
    let rest = lines.collect::<Result<Vec<_>, _>>()?.join("\n");
    let status = extract.wait()?;
    for mut home in [home, successor] {
        drop(home.stdin.take());
        home.wait()?;
    }
    ensure!(status.success(), "{status}: {rest}");
    ensure!(
        world.read_home("out")? == [7; 3 << 20],
        "another file is at home"
    );
    ensure!(!other.path().join("out").exists(), "another home has it");
    Ok(rest)
}

// Without a name that has it wait for its turn among clusters: it hardly does anything but wait.
#[test]
fn extract_finds_its_home_at_another_port() -> Result<()> {
    // The node that sends has not given up, and needs nobody to tell it.
    let rest = extract_to_moved_home("sends 'big' to home")?;
    ensure!(!rest.contains("searching for the home"), "{rest}");
    Ok(())
}

#[test]
fn extract_retries_a_home_abandoned_by_its_node() -> Result<()> {
    extract_to_moved_home("searching for the home").map(drop)
}

#[test]
fn create_names_the_silent_home_and_waiting_time() -> Result<()> {
    let world = start_with_dead_home()?;
    let create = ["volume", "create", "w", "--node", "n1", "--size", "10MB"];
    let mut create = world.bafs_command(&[&create[..], &["--from", "bafs://home/in"]].concat());
    let mut create = create.stderr(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let stderr = create.stderr.take().context("it is piped")?;
    BufReader::new(stderr).read_line(&mut line)?;
    for part in [
        "with 'in' of home",
        world.cluster.home_address(),
        "two minutes",
    ] {
        ensure!(line.contains(part), "{line}");
    }
    ensure!(create.try_wait()?.is_none(), "it waits no more: {line}");
    create.kill()?;
    create.wait()?;
    Ok(())
}

#[test]
fn extract_fails_when_its_home_stays_unreachable() -> Result<()> {
    let world = start_with_dead_home()?;
    let extract = ["volume", "extract", "v", "big", "bafs://home/out"];
    let output = world.bafs_command(&extract).output()?;
    ensure!(!output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains("start the home again"),
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn cluster_volume_names_its_unresponsive_home() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    // It takes connections and says nothing.
    let home = TcpListener::bind("127.0.0.1:0")?;
    let host = home.local_addr()?.to_string();
    let url = format!("http://{host}/db");
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    let mut create = world.bafs_command(&[&create[..], &["--cache", &url]].concat());
    let mut create = create.stderr(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let stderr = create.stderr.take().context("a pipe")?;
    BufReader::new(stderr).read_line(&mut line)?;
    ensure!(
        line.contains("waits up to ten minutes for home") && line.contains(&host),
        "{line}"
    );
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(shown["state"] == "creating", "{shown}");
    let text = world.bafs_command(&["volume", "show", "v"]).output()?;
    ensure!(text.status.success(), printed_text(&text));
    for part in [
        "volume, creating,",
        "waits up to ten minutes for home",
        &host,
    ] {
        ensure!(printed_text(&text).contains(part), printed_text(&text));
    }
    world.run_json(&["volume", "delete", "v"])?;
    ensure!(!create.wait()?.success(), "there is no volume");
    Ok(())
}

#[test]
fn cluster_volumes_leave_nothing_after_failed_creation() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    world.write_home("in/a.txt", b"hello\n")?;
    let wrong = |name: &str, size: &str, source: &str, why: &str| -> Result<()> {
        let create = ["volume", "create", name, "--node", "n1", "--size", size];
        let mut refused = world.bafs_command(&[&create[..], &["--from", source]].concat());
        let refused = refused.output()?;
        ensure!(!refused.status.success(), printed_text(&refused));
        ensure!(printed_text(&refused).contains(why), printed_text(&refused));
        let left = world.run_json(&["volume", "list"])?;
        ensure!(left.as_array().is_some_and(Vec::is_empty), "{left}");
        Ok(())
    };
    wrong("v", "9MB", "bafs://home/nowhere", "cannot create volume")?;
    wrong("../x", "1MB", "bafs://home/in", "is not a name")?;
    wrong("x/y", "1MB", "bafs://home/in", "is not a name")?;
    wrong("v", "0", "bafs://home/in", "--size is 0 bytes")?;
    // Neither its space nor its name is taken.
    let create = ["volume", "create", "v", "--node", "n1", "--size", "9MB"];
    world.run_json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(shown["state"] == "ready", "{shown}");
    Ok(())
}

#[test]
fn cluster_volumes_are_warmed_where_their_source_fits() -> Result<()> {
    let world = start_cluster(&["10MB", "10MB"])?;
    world.write_home("one/p/a", &[1; 100_000])?;
    world.write_home("two/q/a", &[2; 100_000])?;
    let cache = |name: &str, node: &str, size: &str, source: &str| {
        let create = ["volume", "create", name, "--node", node, "--size", size];
        world.run_json(&[&create[..], &["--cache", source]].concat())
    };
    let one = cache("d", "n1", "1MB", "bafs://home/one")?;
    cache("d", "n2", "1MB", "bafs://home/two")?;
    fn warm<'a>(args: &[&'a str]) -> Vec<&'a str> {
        [&["volume", "warm"], args, &["--wait"]].concat()
    }
    let warmed = world.run_json(&warm(&["d", "--path", "p"]))?;
    let warmed = warmed.as_array().context("a list")?;
    let is_done = |share: &&serde_json::Value| share["warming"]["state"] == "done";
    let done: Vec<_> = warmed.iter().filter(is_done).collect();
    ensure!(done.len() == 1 && done[0]["node"] == "n1", "{warmed:?}");
    ensure!(done[0]["warming"]["cached_bytes"] == 100_000, "{done:?}");
    let other = warmed.iter().find(|share| share["node"] == "n2");
    let fault = other.map(|share| share["error"].to_string());
    ensure!(
        fault.is_some_and(|fault| fault.contains("no 'p'")),
        "{other:?}"
    );
    // By its id: those that share its blocks, and no others.
    let id = one["id"].as_str().context("an id")?;
    let warmed = world.run_json(&warm(&[id]))?;
    ensure!(
        warmed.as_array().is_some_and(|all| all.len() == 1),
        "{warmed}"
    );
    let nowhere = world.bafs_command(&warm(&["d", "--path", "r"])).output()?;
    ensure!(nowhere.status.code() == Some(4), printed_text(&nowhere));
    // What finds no room is no success.
    cache("small", "n1", "70KB", "bafs://home/one")?;
    let full = world.bafs_command(&warm(&["small"])).output()?;
    ensure!(full.status.code() == Some(6), printed_text(&full));
    ensure!(
        printed_text(&full).contains("some blocks do not fit on n1"),
        printed_text(&full)
    );
    Ok(())
}

#[test]
fn cluster_volumes_survive_a_killed_node() -> Result<()> {
    let mut world = start_cluster(&["10MB"])?;
    world.write_home("in/a.txt", b"hello\n")?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    let made = world.run_json(&[&create[..], &["--from", "bafs://home/in/a.txt"]].concat())?;
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
    world.cluster.kill("n1")?;
    world.cluster.restart("n1")?;
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(
        shown["id"] == made["id"] && shown["state"] == "ready",
        "{shown}"
    );
    world.run_json(&["volume", "extract", "v", "a.txt", "bafs://home/out/c.txt"])?;
    ensure!(
        world.read_home("out/c.txt")? == b"hello\n",
        "the file came through"
    );
    world.run_json(&["volume", "invalidate", "c"])?;
    Ok(())
}

#[test]
fn cluster_space_is_never_promised_twice() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    world.run_json(&["volume", "create", "a", "--node", "n1", "--size", "6MB"])?;
    let second = world
        .bafs_command(&["volume", "create", "b", "--node", "n1", "--size", "6MB"])
        .output()?;
    ensure!(second.status.code() == Some(6), printed_text(&second));
    ensure!(
        printed_text(&second).contains("NoSpaceBytes"),
        printed_text(&second)
    );
    world.run_json(&["volume", "delete", "a"])?;
    world.run_json(&["volume", "create", "b", "--node", "n1", "--size", "6MB"])?;
    Ok(())
}

#[test]
fn cluster_refuses_strangers_and_wrong_use() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    let other = tempfile::tempdir()?;
    let identity = other.path().join("identity");
    let init = Command::new(bafs_program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(init.status.success(), printed_text(&init));
    let again = Command::new(bafs_program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(
        again.status.code() == Some(1),
        "an authority is never overwritten"
    );
    let stranger = world
        .bafs_command(&["servers"])
        .env("BAFS_IDENTITY", &identity)
        .output()?;
    ensure!(stranger.status.code() == Some(1), printed_text(&stranger));
    let missing = world
        .bafs_command(&["servers"])
        .env("BAFS_IDENTITY", "/no/such/dir")
        .output()?;
    ensure!(
        printed_text(&missing).contains("bafs init"),
        printed_text(&missing)
    );
    let nobody = world
        .bafs_command(&["servers"])
        .env("BAFS_CATALOG", "127.0.0.1:9")
        .output()?;
    ensure!(
        printed_text(&nobody).contains("127.0.0.1:9"),
        printed_text(&nobody)
    );
    let no_node = world
        .bafs_command(&["volume", "create", "v", "--node", "x", "--size", "1MB"])
        .output()?;
    ensure!(
        printed_text(&no_node).contains("no live node 'x'; live nodes: n1"),
        printed_text(&no_node)
    );
    let taken = world.cluster.address("n1");
    let port = world
        .bafs_command(&["catalog", "--listen", taken])
        .output()?;
    ensure!(
        port.status.code() == Some(1) && printed_text(&port).contains("in use"),
        printed_text(&port)
    );
    let vague = world
        .bafs_command(&["catalog", "--listen", "0.0.0.0:0"])
        .output()?;
    ensure!(
        printed_text(&vague).contains("give the address"),
        printed_text(&vague)
    );
    let size = world
        .bafs_command(&["volume", "create", "v", "--node", "n1", "--size", "10"])
        .output()?;
    ensure!(
        size.status.code() == Some(2),
        "a size without unit is refused: {}",
        printed_text(&size)
    );
    Ok(())
}

/// What `bafs grant` makes mounts its volume and lists servers; it does nothing else, and sees no
/// other volume.
#[test]
fn cluster_grants_are_for_their_volumes_only() -> Result<()> {
    let world = start_cluster(&["20MB"])?;
    for name in ["mine", "other"] {
        world.run_json(&["volume", "create", name, "--node", "n1", "--size", "1MB"])?;
    }
    world.write_home("data/f", b"hello\n")?;
    let cache = ["volume", "create", "shown", "--node", "n1", "--size", "1MB"];
    world.run_json(&[&cache[..], &["--cache", "bafs://home/data"]].concat())?;
    let directory = tempfile::tempdir()?;
    let with = |identity: &str, args: &[&str]| {
        let mut command = world.bafs_command(args);
        command.env("BAFS_IDENTITY", directory.path().join(identity));
        command.output()
    };
    for (to, more) in [("rw", &[][..]), ("ro", &["--read-only"])] {
        let to = directory.path().join(to);
        let to = to.to_str().context("a path of text")?;
        world.run_json(&[&["grant", "mine", "--to", to][..], more].concat())?;
        let again = world
            .bafs_command(&["grant", "mine", "--to", to])
            .output()?;
        ensure!(again.status.code() == Some(1), "{}", printed_text(&again));
    }
    for identity in ["rw", "ro"] {
        let listed = with(identity, &["volume", "list", "--json"])?;
        let text = printed_text(&listed);
        ensure!(listed.status.success(), "{text}");
        ensure!(text.contains("mine") && !text.contains("other"), "{text}");
        for refused in [
            &["volume", "delete", "mine"][..],
            &["volume", "show", "other"],
            &["volume", "create", "new", "--node", "n1", "--size", "1MB"],
        ] {
            let output = with(identity, refused)?;
            // Denied, or not to be seen.
            let code = output.status.code();
            ensure!(matches!(code, Some(3 | 4)), "{}", printed_text(&output));
        }
        for possible_for_others in [
            &["volume", "extract", "mine", "f", "bafs://home/f"][..],
            &["volume", "replicate", "mine", "--to", "n1"],
            &["volume", "invalidate", "shown"],
            &["volume", "warm", "shown"],
        ] {
            let output = with(identity, possible_for_others)?;
            let (text, code) = (printed_text(&output), output.status.code());
            let is_refused = matches!(code, Some(3..=5)) && !text.contains("usage");
            ensure!(is_refused, "{possible_for_others:?}: {text}");
        }
        let servers = with(identity, &["servers"])?;
        ensure!(servers.status.success() && printed_text(&servers).contains("n1"));
    }
    ensure!(world.read_home("f").is_err(), "something was sent home");
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_grants_are_for_their_volumes_only (jobs)", &reason);
        return Ok(());
    }
    let job = |identity: &str, mount: &str, script: &str| {
        let args = ["exec", "--mount", mount, "--", "/bin/sh", "-ec", script];
        with(identity, &args)
    };
    let written = job("rw", "mine:/vol", "echo hello > /vol/f")?;
    ensure!(written.status.success(), "{}", printed_text(&written));
    let read = job("ro", "mine:/vol:ro", "cat /vol/f")?;
    ensure!(read.stdout == b"hello\n", "{}", printed_text(&read));
    for (identity, mount) in [("ro", "mine:/vol"), ("rw", "other:/vol")] {
        let refused = job(identity, mount, "echo changed > /vol/f")?;
        ensure!(!refused.status.success(), "{}", printed_text(&refused));
    }
    let read = job("ro", "mine:/vol:ro", "cat /vol/f")?;
    ensure!(read.stdout == b"hello\n", "{}", printed_text(&read));
    Ok(())
}

#[test]
fn cluster_volume_is_found_while_others_are_deleted() -> Result<()> {
    let world = start_cluster(&["40MB"])?;
    let create = |name: &str| {
        let args = ["volume", "create", name, "--node", "n1", "--size", "100KB"];
        world.run_json(&args)
    };
    let kept = create("kept")?;
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        for number in 0..3 {
            let (create, is_over, world) = (&create, &is_over, &world);
            others.push(scope.spawn(move || -> Result<u32> {
                let mut rounds = 0;
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    let name = format!("t{number}-{rounds}");
                    create(&name)?;
                    world.run_json(&["volume", "delete", &name])?;
                    rounds += 1;
                }
                Ok(rounds)
            }));
        }
        let mut looks = Ok(());
        for _ in 0..40 {
            looks = world
                .run_json(&["volume", "show", "kept"])
                .and_then(|shown| {
                    ensure!(shown["id"] == kept["id"], "{shown}");
                    Ok(())
                });
            if looks.is_err() {
                break;
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        let mut rounds = 0;
        for other in others {
            rounds += other.join().expect("a thread ends")?;
        }
        ensure!(rounds > 10, "{rounds} deletions: nothing was tested");
        looks
    })
}
