//! Other users of the machine and of the cluster: stores that somebody prepared, tokens that cost
//! much, volumes of a node that runs as somebody else.

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use bafs_proto::ErrorCode;
use bafs_proto::identity::Identity;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::TOKEN_BLOCKS_MAX;
use bafs_proto::message::{GetVolume, Role};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_tests::small_disk::{path_in_namespace, start_node_on_disk};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Somebody who is neither root nor runs tests.
const OTHER_USER_ID: u32 = 65_533;

/// Calls that each of three hostile callers has under way.
const CONCURRENT_CALLS: usize = 16;

#[expect(clippy::disallowed_methods, reason = "tokens expire by the clock")]
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// What a node says that is started with a store, and ends at once.
fn start_with_store(world: &TestCluster, store: &Path) -> Result<Output> {
    let store = store.to_string_lossy();
    let args = ["node", "--store", &store, "--size", "9MB", "--name", "odd"];
    let ending = ["--until-stdin-closes"];
    Ok(world
        .bafs_command(&[&args[..], &ending].concat())
        .output()?)
}

#[test]
fn cluster_node_refuses_stores_prepared_by_others() -> Result<()> {
    let world = TestCluster::start(&["10MB"])?;
    let place = tempfile::tempdir()?;
    let (store, elsewhere) = (place.path().join("store"), place.path().join("elsewhere"));
    std::fs::create_dir(&store)?;
    std::fs::create_dir(&elsewhere)?;
    let refusal = |part: &str| {
        let output = start_with_store(&world, &store)?;
        ensure!(
            !output.status.success(),
            "it started: {}",
            printed_text(&output)
        );
        ensure!(printed_text(&output).contains(part), printed_text(&output));
        Ok(())
    };
    for (name, target) in [("volumes", &elsewhere), ("starts", &place.path().join("x"))] {
        symlink(target, store.join(name))?;
        refusal(&format!("'{name}' in it is a symbolic link"))?;
        std::fs::remove_file(store.join(name))?;
    }
    std::fs::write(store.join("starts"), "")?;
    std::fs::set_permissions(&store, PermissionsExt::from_mode(0o777))?;
    refusal("other users may write to it")?;
    if is_root() {
        std::fs::remove_file(store.join("starts"))?;
        chown(&store, Some(OTHER_USER_ID), None)?;
        refusal("it belongs to another user (uid 65533)")?;
        chown(&store, Some(0), None)?;
        chown(place.path(), Some(OTHER_USER_ID), None)?;
        refusal("could put another in its place")?;
        chown(place.path(), Some(0), None)?;
    } else {
        report_skip(
            "cluster_node_refuses_stores_prepared_by_others",
            "it needs root for owners",
        );
        std::fs::remove_file(store.join("starts"))?;
    }
    ensure!(
        std::fs::read_dir(&elsewhere)?.next().is_none(),
        "a link was followed"
    );
    // Empty and its own: it is closed to others, and used.
    let output = start_with_store(&world, &store)?;
    ensure!(output.status.success(), printed_text(&output));
    let mode = std::fs::metadata(&store)?.permissions().mode() & 0o777;
    ensure!(mode == 0o700, "{mode:o}");
    Ok(())
}

/// Asks a node for volumes that are none of its business, again and again, until told to stop.
async fn call_repeatedly(
    identity: Identity,
    token: Token,
    node: String,
    over: Arc<AtomicBool>,
) -> u64 {
    let pool = Pool::new(Arc::new(Dialer::new(&identity).expect("a dialer")));
    let mut refused = 0;
    while !over.load(Ordering::Relaxed) {
        let volume = VolumeId::random();
        let deadline = Deadline::after_ms(20_000);
        let answer = pool.call(&node, &token, GetVolume { volume }, deadline);
        let code = answer.await.err().map(|error| error.code);
        refused += u64::from(code == Some(ErrorCode::RightMissing));
    }
    refused
}

#[test]
fn cluster_node_serves_others_beside_costly_tokens() -> Result<()> {
    let name = "cluster_node_serves_others_beside_costly_tokens";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])?;
    let granted = tempfile::tempdir()?;
    let narrow = granted.path().join("narrow");
    world.run_json(&["grant", "v", "--to", &narrow.to_string_lossy()])?;
    let identity = Identity::load(&narrow.join("agent"), Role::Agent)?;
    // As many blocks as a server reads, each of its own.
    let mut token = identity.token.clone();
    let mut blocks = 2;
    while blocks < TOKEN_BLOCKS_MAX {
        let expires = Time(now_ms() + 3_600_000 + blocks as u64);
        let rights = [Right::Read, Right::Write];
        let volumes = [Resource::Volumes];
        token = identity
            .verifier
            .narrow(&token, &volumes, &rights, expires)?;
        blocks += 1;
    }
    let node = world.cluster.address("n1").to_owned();
    let over = Arc::new(AtomicBool::new(false));
    let runtime = Runtime::new()?;
    let mut callers = JoinSet::new();
    for _ in 0..3 * CONCURRENT_CALLS {
        let (identity, token) = (identity.clone(), token.clone());
        let caller = call_repeatedly(identity, token, node.clone(), over.clone());
        callers.spawn_on(caller, runtime.handle());
    }
    let served = check_other_users(&world);
    over.store(true, Ordering::Relaxed);
    let refused: u64 = runtime.block_on(callers.join_all()).into_iter().sum();
    served?;
    ensure!(
        refused > 50,
        "{refused} calls were refused: nothing was tested"
    );
    Ok(())
}

/// A user's jobs run, and the node stays in the catalog.
fn check_other_users(world: &TestCluster) -> Result<()> {
    std::thread::sleep(Duration::from_secs(1));
    for round in 0..6 {
        let servers = world.run_json(&["servers"])?;
        let listed = servers.as_array().context("a list")?;
        ensure!(
            listed.iter().any(|it| it["name"] == "n1"),
            "round {round}: {servers}"
        );
        let exec = ["exec", "--mount", "v:/s", "--", "sh", "-c", "echo x > /s/f"];
        let output = world.bafs_command(&exec).output()?;
        ensure!(
            output.status.success(),
            "round {round}: {}",
            printed_text(&output)
        );
    }
    Ok(())
}

#[test]
fn cluster_grant_states_its_true_expiry() -> Result<()> {
    let world = TestCluster::start(&["10MB"])?;
    world.wait_for_servers(2)?;
    world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])?;
    let place = tempfile::tempdir()?;
    let grant = |name: &str, days: &str| -> Result<(u64, String)> {
        let to = place.path().join(name).to_string_lossy().into_owned();
        let args = ["grant", "v", "--to", &to, "--days", days];
        let told = world.run_json(&args)?;
        std::fs::remove_dir_all(&to)?;
        let output = world.bafs_command(&args).output()?;
        Ok((
            told["expires"].as_u64().context("a time")?,
            printed_text(&output),
        ))
    };
    let day = 24 * 3_600_000;
    // The identities of a throw-away cluster are good for a week.
    let (long, text) = grant("long", "30")?;
    ensure!(long <= now_ms() + 7 * day, "{long}");
    ensure!(
        text.contains(&format!("until {}", Time(long).to_utc_text())),
        "{text}"
    );
    ensure!(
        text.contains("when the identity that it was made with expires"),
        "{text}"
    );
    let (short, text) = grant("short", "1")?;
    ensure!(short > now_ms() + day - 60_000 && short < long, "{short}");
    ensure!(!text.contains("that it was made with"), "{text}");
    Ok(())
}

#[test]
fn cluster_node_limits_files_to_its_disk() -> Result<()> {
    let name = "cluster_node_limits_files_to_its_disk";
    if !is_root() {
        report_skip(name, "it needs root to mount a small file system");
        return Ok(());
    }
    let world = TestCluster::start(&["10MB"])?;
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let disk = "-t tmpfs -o size=60m,nr_inodes=1500 tmpfs";
    let mut node = start_node_on_disk(disk, &world, &store)?;
    world.wait_for_servers(3)?;
    let servers = world.run_json(&["servers"])?;
    let listed = servers.as_array().context("a list")?;
    let small = listed
        .iter()
        .find(|it| it["name"] == "small")
        .context("it")?;
    let files = small["capacity_files"].as_u64().context("a number")?;
    ensure!((1_300..1_500).contains(&files), "{small}");
    let create = |files: &str| {
        let args = [
            "volume", "create", "w", "--node", "small", "--size", "9MB", "--files", files,
        ];
        world.bafs_command(&args).output()
    };
    let output = create("5000")?;
    ensure!(!output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains("needs 5000 files, "),
        printed_text(&output)
    );
    let at = path_in_namespace(&node, &store);
    for number in 0..1_600 {
        if std::fs::write(at.join(format!("x{number}")), "").is_err() {
            break;
        }
    }
    let output = create("100")?;
    ensure!(!output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains("has no files (inodes) left: 0 of 1500"),
        printed_text(&output)
    );
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

/// In a name space of its own `/dev/fuse` is open to everybody, as in a container.
const OTHER_USER_SCRIPT: &str =
    "mknod $1/fuse c 10 229 && chmod 666 $1/fuse && mount --bind $1/fuse /dev/fuse \
    && exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -c '
    \"$0\" mount v $1/mnt --identity $1/narrow & mounted=$!
    for n in $(seq 100); do grep -q $1/mnt /proc/mounts && break; sleep 0.1; done
    grep -q $1/mnt /proc/mounts || exit 9
    echo hi > $1/mnt/f && mkdir $1/mnt/d && mv $1/mnt/f $1/mnt/d/g && chmod 600 $1/mnt/d/g \
        && cat $1/mnt/d/g && stat -c %u:%a $1/mnt/d/g
    kill $mounted; wait $mounted' \"$0\" $1";

#[test]
fn mount_by_another_user_can_write() -> Result<()> {
    let name = "mount_by_another_user_can_write";
    if !is_root() || mount_obstacle().is_some() {
        report_skip(name, "it needs root, and mounts");
        return Ok(());
    }
    let world = TestCluster::start(&["10MB"])?;
    world.wait_for_servers(2)?;
    world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])?;
    let place = tempfile::tempdir()?;
    let narrow = place.path().join("narrow").to_string_lossy().into_owned();
    world.run_json(&["grant", "v", "--to", &narrow])?;
    std::fs::create_dir(place.path().join("mnt"))?;
    let all = Command::new("chown")
        .args(["-R", "65534:65534"])
        .arg(place.path())
        .status()?;
    ensure!(all.success(), "chown");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", OTHER_USER_SCRIPT])
        .arg(bafs_program())
        .arg(place.path());
    command
        .env("BAFS_CATALOG", world.cluster.catalog_address())
        .stdin(Stdio::null());
    let output = command.output()?;
    let told = printed_text(&output);
    if told.contains("mknod") || told.contains("No such device") {
        report_skip(name, &told);
        return Ok(());
    }
    ensure!(told.contains("hi\n65534:600\n"), told);
    // A job of the node's user goes on with it.
    let exec = ["exec", "--mount", "v:/s", "--", "cat", "/s/d/g"];
    let output = world.bafs_command(&exec).output()?;
    ensure!(output.stdout == b"hi\n", printed_text(&output));
    Ok(())
}
