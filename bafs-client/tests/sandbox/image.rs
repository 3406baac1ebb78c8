//! Cases: jobs whose root directory is a volume.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use bafs_client::sandbox::{Access, NotStartedReason, SandboxOutcome};

use crate::Case;
use crate::sandbox_fixture::{AgentUser, SandboxFixture};

pub(crate) const CASES: &[Case] = &[
    ("a_root_shows_only_the_image", a_root_shows_only_the_image),
    (
        "a_complete_image_needs_no_stand_ins",
        a_complete_image_needs_no_stand_ins,
    ),
    (
        "volumes_appear_inside_the_root",
        volumes_appear_inside_the_root,
    ),
    ("the_root_cannot_be_written", the_root_cannot_be_written),
    (
        "temporary_directories_and_home_are_private",
        temporary_directories_and_home_are_private,
    ),
    (
        "programs_are_looked_up_in_the_root",
        programs_are_looked_up_in_the_root,
    ),
    (
        "the_image_names_the_jobs_user",
        the_image_names_the_jobs_user,
    ),
    (
        "links_of_the_image_stay_inside",
        links_of_the_image_stay_inside,
    ),
    ("a_file_is_no_root", a_file_is_no_root),
];

/// Copies a program of the host, with its libraries, to where it is.
fn copy_program(program: &str, image: &Path) {
    let found = Command::new("sh")
        .args(["-c", "command -v \"$0\"", program])
        .output()
        .unwrap();
    let path = String::from_utf8(found.stdout).unwrap().trim().to_owned();
    let listed = Command::new("ldd").arg(&path).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let libraries = listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    for file in libraries.chain([path.as_str()]) {
        let to = image.join(file.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        if !to.exists() {
            fs::copy(file, to).unwrap();
        }
    }
}

/// A job with an image of a shell and a few programs as its root.
fn fixture(user: AgentUser, script: &str) -> SandboxFixture {
    let mut world = SandboxFixture::new(user, script);
    let image = world.path("image");
    for program in ["sh", "cat", "ls", "id", "mkdir", "touch", "env"] {
        copy_program(program, &image);
    }
    fs::create_dir_all(image.join("etc")).unwrap();
    fs::write(image.join("etc/name"), "image\n").unwrap();
    fs::write(image.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n").unwrap();
    world.add_volume(image, "/", Access::ReadWrite);
    world.task.plan.program = "/bin/sh".into();
    let shell = world.path("image/bin/sh");
    if !shell.exists() {
        fs::create_dir_all(shell.parent().unwrap()).unwrap();
        fs::copy("/bin/sh", shell).unwrap();
    }
    world
}

fn names(text: &str) -> BTreeSet<String> {
    text.lines().map(str::to_owned).collect()
}

fn a_root_shows_only_the_image(user: AgentUser) {
    let world = fixture(user, "cat /etc/name && ls /").with_temporary();
    let listed = fs::read_dir(world.path("image")).unwrap();
    let mut expected: BTreeSet<String> = listed
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    expected.extend(["dev", "image", "proc", "sys", "tmp", "var"].map(str::to_owned));
    assert_eq!(names(&world.expect_output()), expected);
}

fn a_complete_image_needs_no_stand_ins(user: AgentUser) {
    let script = "cat /etc/name; ls -A /tmp; echo x >/tmp/x && cat /tmp/x; ls -A /var; \
                  test -c /dev/null && test -r /proc/self/stat && echo found";
    let world = fixture(user, script).with_temporary();
    for name in ["dev", "proc", "sys", "tmp", "var/tmp"] {
        fs::create_dir_all(world.path("image").join(name)).unwrap();
    }
    fs::write(world.path("image/tmp/of-image"), "").unwrap();
    assert_eq!(world.expect_output(), "image\nx\ntmp\nfound\n");
    assert!(!world.path("image/tmp/x").exists());
}

fn volumes_appear_inside_the_root(user: AgentUser) {
    let script = "cat /data/in/name /etc/inner/name /tmp/v/name /etc/name; echo x >/data/in/new";
    let world = fixture(user, script)
        .with_temporary()
        .with_volume("/data/in")
        .with_volume("/etc/inner")
        .with_volume("/tmp/v");
    assert_eq!(
        world.expect_output(),
        "volume 0\nvolume 1\nvolume 2\nimage\n"
    );
}

fn the_root_cannot_be_written(user: AgentUser) {
    let script = "touch /etc/new || touch /new || touch /bin/sh || echo x >/etc/name || echo kept";
    let world = fixture(user, script).with_temporary();
    // Those who may write the image on the host.
    let everybody = Permissions::from_mode(0o777);
    fs::set_permissions(world.path("image/etc"), everybody).unwrap();
    assert_eq!(world.expect_output(), "kept\n");
    assert_eq!(
        fs::read_to_string(world.path("image/etc/name")).unwrap(),
        "image\n"
    );
}

fn temporary_directories_and_home_are_private(user: AgentUser) {
    let script = "ls -A /tmp /var/tmp $HOME; echo x | cat >$HOME/.cache && cat $HOME/.cache && \
                  mkdir /var/tmp/d && ls /var/tmp";
    let mut world = fixture(user, script).with_temporary();
    let environment = &mut world.task.plan.environment;
    environment.push(("HOME".into(), "/home/somebody".into()));
    let heads = "/home/somebody:\n\n/tmp:\n\n/var/tmp:\n";
    assert_eq!(world.expect_output(), format!("{heads}x\nd\n"));
}

fn programs_are_looked_up_in_the_root(user: AgentUser) {
    let mut world = fixture(user, "").with_temporary();
    let plan = &mut world.task.plan;
    plan.environment.retain(|(name, _)| name != "PATH");
    plan.program = "greet".into();
    plan.arguments = Vec::new();
    let programs = world.path("image/opt/greeter/bin");
    fs::create_dir_all(&programs).unwrap();
    fs::write(programs.join("greet"), "#!/bin/sh\necho $GREETING\n").unwrap();
    fs::set_permissions(programs.join("greet"), Permissions::from_mode(0o755)).unwrap();
    let described = r#"{"environment": [["PATH", "/opt/greeter/bin"], ["GREETING", "hello"]]}"#;
    fs::write(world.path("image/.bafs-image.json"), described).unwrap();
    assert_eq!(world.expect_output(), "hello\n");

    // The host has it, and the image has not.
    world.task.plan.program = "setpriv".into();
    let report = world.run().report;
    let SandboxOutcome::NotStarted(refusal) = report.outcome else {
        panic!("{report:?}")
    };
    assert_eq!(refusal.reason, NotStartedReason::ExecutableMissing);
    assert!(refusal.message.contains("/opt/greeter/bin"), "{refusal}");
}

fn the_image_names_the_jobs_user(user: AgentUser) {
    let world = fixture(user, "id -u; id -un").with_temporary();
    let name = match user.uid() {
        0 => "root",
        _ => "bafs",
    };
    assert_eq!(world.expect_output(), format!("{}\n{name}\n", user.uid()));
}

fn links_of_the_image_stay_inside(user: AgentUser) {
    let script = "cat /link/name /real/name; cat /above/etc/name";
    let world = fixture(user, script).with_temporary().with_volume("/link");
    let image = world.path("image");
    fs::create_dir(image.join("real")).unwrap();
    symlink("/real", image.join("link")).unwrap();
    symlink("../../..", image.join("above")).unwrap();
    assert_eq!(world.expect_output(), "volume 0\nvolume 0\nimage\n");
}

fn a_file_is_no_root(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "true");
    let file = world.path("archive.tar");
    fs::write(&file, "x").unwrap();
    world.add_volume(file, "/", Access::ReadOnly);
    let report = world.run().report;
    let SandboxOutcome::NotStarted(refusal) = report.outcome else {
        panic!("{report:?}")
    };
    assert_eq!(refusal.reason, NotStartedReason::PathUnusable);
    assert!(refusal.message.contains("bafs import image"), "{refusal}");
}
