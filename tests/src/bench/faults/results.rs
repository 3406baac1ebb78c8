//! Faults that gave wrong results with exit code 0.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::stat::Mode;

use super::user_directory::UserDirectory;
use crate::TestCluster;

/// Programs name their temporary files by their process number. At once on one machine, they do
/// not disturb each other.
pub(super) fn check_temporary_files_named_by_pid() -> Result<()> {
    let directory = UserDirectory::new()?;
    let text = "for i in 1..4\nvolume w$(i) scratch 1 MB\njob tool$(i) {\nexecutable = sh\n\
        arguments = -c 't=/tmp/calc.$$; echo $(i) > $t; sleep 1; cat $t > /w/out; rm -f $t; \
        echo $$ > /w/pid'\n}\nmount w$(i) tool$(i) /w\n\
        extract w$(i) out bafs://home/out.$(i)\nextract w$(i) pid bafs://home/pid.$(i)\nend\n";
    directory
        .run_workflow(text, &["--local", "2"])?
        .check_code(0)?;
    let mut numbers = BTreeSet::new();
    for i in 1..=4 {
        let found = directory.read_file(&format!("out.{i}"));
        ensure!(found == i.to_string(), "job {i} has the data '{found}'");
        numbers.insert(directory.read_file(&format!("pid.{i}")));
    }
    ensure!(
        numbers.len() > 1,
        "all jobs have the process number {numbers:?}"
    );
    Ok(())
}

/// How many of three MPI jobs on one node, at once, end well and have a session directory that is
/// theirs alone. Programs seldom fail where it is not: when one removes it as another begins.
pub(super) fn count_mpi_jobs_that_succeed() -> Result<u32> {
    const JOBS: u32 = 3;
    let world = TestCluster::start_with_spec(&["200MB"], |spec| spec.slots = JOBS)?;
    world.wait_for_servers(2)?;
    let mark = "$PMIX_SERVER_TMPDIR/mark.$OMPI_COMM_WORLD_RANK";
    let text = format!(
        "for i in 1..{JOBS}\nvolume w$(i) scratch 5 MB\njob mpi$(i) {{\nexecutable = mpirun\n\
         arguments = --allow-run-as-root --oversubscribe -n 2 sh -c \
         'test -d $PMIX_SERVER_TMPDIR || exit 9; echo $(i) > {mark}; sleep 3; cat {mark}'\n\
         output = /w/out\n}}\nmount w$(i) mpi$(i) /w\nextract w$(i) out bafs://home/mpi/$(i)\nend\n"
    );
    let path = world.write_workflow(&text)?;
    world.bafs_command(&["run"]).arg(&path).output()?;
    let is_right = |i: &u32| {
        let found = world.read_home(&format!("mpi/{i}")).unwrap_or_default();
        found == format!("{i}\n{i}\n").into_bytes()
    };
    Ok(u32::try_from((1..=JOBS).filter(is_right).count())?)
}

/// A cache of the place where the same workflow extracts would show the second run the first
/// one's file.
pub(super) fn check_cache_of_extract_target() -> Result<()> {
    let directory = UserDirectory::new()?;
    let text = |target: &str| {
        format!(
            "volume w scratch 10 MB\nvolume idx cache bafs://home/idx 10 MB\n\
             job make {{\nexecutable = sh\narguments = -c 'echo hello > /w/index.txt'\n}}\n\
             job use {{\nexecutable = sh\narguments = -c 'cat /idx/index.txt'\n}}\n\
             parent make child use\nmount w make /w\nmount idx use /idx\n\
             extract w index.txt bafs://home/{target}\n"
        )
    };
    directory.write_file("fine.bafs", &text("other/index.txt"))?;
    directory.run_bafs(&["check", "fine.bafs"])?.check_code(0)?;
    directory.write_file("stale.bafs", &text("idx/index.txt"))?;
    directory.run_bafs(&["check", "stale.bafs"])?.check_code(1)
}

/// Names are bytes: a job sees also a file whose name is no UTF-8.
pub(super) fn check_non_utf8_names() -> Result<()> {
    for source in [
        "cache bafs://home/in 1 MB",
        "scratch 1 MB from bafs://home/in",
    ] {
        let directory = UserDirectory::new()?;
        for i in 1..=3 {
            directory.write_file(&format!("in/s{i}.txt"), "s\n")?;
        }
        let odd = OsStr::from_bytes(b"\xe9chantillon4.txt");
        std::fs::write(directory.path("in").join(odd), "s\n")?;
        let text = format!(
            "volume c {source}\nvolume w scratch 1 MB\njob j {{\nexecutable = sh\n\
             arguments = -c 'cat /c/*.txt | wc -l > /w/o'\n}}\nmount c j /c ro\nmount w j /w\n\
             extract w o bafs://home/o\n"
        );
        directory
            .run_workflow(&text, &["--local", "1"])?
            .check_code(0)?;
        let found = directory.read_file("o");
        ensure!(found == "4", "{found} of 4 files are seen ({source})");
    }
    Ok(())
}

/// A scheduler made of commands: forty tasks, eight at once; none of its calls may fail.
pub(super) fn check_scheduler_of_commands() -> Result<()> {
    const TASKS: usize = 40;
    const AT_ONCE: usize = 8;
    let world = TestCluster::start_with_spec(&["1GB"], |spec| spec.slots = 8)?;
    world.wait_for_servers(2)?;
    world.write_home("ref/genome.fa", b">one\nACGT\n>two\nACGT\n")?;
    let cache = [
        "volume", "create", "sref", "--node", "n1", "--size", "20MB", "--cache",
    ];
    let made = world.run_json(&[&cache[..], &["bafs://home/ref"]].concat())?;
    let cache = made["id"].as_str().context("an id")?;
    let task = |i: usize| -> Result<()> {
        let name = format!("t{i}");
        let made = ["volume", "create", &name, "--node", "n1", "--size", "5MB"];
        let made = world.run_json(&made)?;
        let id = made["id"].as_str().context("an id")?;
        let (own, read) = (format!("{id}:/w"), format!("{cache}:/ref:ro"));
        let count = "grep -c '>' /ref/genome.fa > /w/n";
        let exec = [
            "exec", "--mount", &own, "--mount", &read, "--", "sh", "-c", count,
        ];
        let target = format!("bafs://home/mini/{i}");
        for call in [
            &exec[..],
            &["volume", "extract", id, "n", &target],
            &["volume", "delete", id],
        ] {
            let output = world.bafs_command(call).output()?;
            ensure!(
                output.status.success(),
                "{call:?}: {}",
                crate::printed_text(&output)
            );
        }
        ensure!(
            world.read_home(&format!("mini/{i}"))? == b"2\n",
            "result {i} is wrong"
        );
        Ok(())
    };
    let errors: Vec<anyhow::Error> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE)
            .map(|at| {
                let task = &task;
                scope.spawn(move || {
                    let own = (at..TASKS).step_by(AT_ONCE);
                    own.filter_map(|i| task(i).err()).collect::<Vec<_>>()
                })
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined
            .flat_map(|errors| errors.unwrap_or_default())
            .collect()
    });
    let first = errors.first().map(|error| format!("{error:#}"));
    ensure!(
        errors.is_empty(),
        "{} of {TASKS} tasks failed: {}",
        errors.len(),
        first.unwrap_or_default()
    );
    Ok(())
}

/// A directory above a mount point stays unchanged: the same file system, and new files there stay.
pub(super) fn check_directory_above_mount_point() -> Result<()> {
    let directory = UserDirectory::new()?;
    directory.write_file("above/there", "x")?;
    let above = format!("{}/above", directory.shell_word());
    let text = format!(
        "volume w scratch 10 MB\njob j {{\nexecutable = sh\n\
         arguments = -c 'stat -f -c %T {above} > {above}/point/o; cat {above}/there >> \
         {above}/point/o; mkdir {above}/made'\n}}\nmount w j {above}/point\n\
         extract w o bafs://home/o\n"
    );
    let plain = directory.run_to_end(Command::new("stat").args(["-f", "-c", "%T", &above]))?;
    directory
        .run_workflow(&text, &["--local", "1"])?
        .check_code(0)?;
    let found = directory.read_file("o");
    let wanted = format!("{}\nx", plain.output.trim());
    ensure!(
        found == wanted,
        "the job sees '{found}' instead of '{wanted}'"
    );
    ensure!(
        directory.path("above/made").is_dir(),
        "what it made is gone"
    );
    Ok(())
}

/// The top of a cache, and of a filled volume, has the mode and the time of its source.
pub(super) fn check_root_attributes() -> Result<()> {
    for source in [
        "cache bafs://home/in 1 MB",
        "scratch 1 MB from bafs://home/in",
    ] {
        let directory = UserDirectory::new()?;
        directory.write_file("in/a", "a\n")?;
        let made = "chmod 750 in; touch -d @1000000000 in";
        directory
            .run_to_end(Command::new("sh").args(["-c", made]))?
            .check_code(0)?;
        let text = format!(
            "volume c {source}\nvolume w scratch 1 MB\njob j {{\nexecutable = sh\n\
             arguments = -c 'stat -c \"%a %Y\" /c > /w/o'\n}}\nmount c j /c ro\nmount w j /w\n\
             extract w o bafs://home/o\n"
        );
        directory
            .run_workflow(&text, &["--local", "1"])?
            .check_code(0)?;
        let found = directory.read_file("o");
        ensure!(found == "750 1000000000", "{source} shows '{found}'");
    }
    Ok(())
}

/// A subdirectory that home cannot read affects only jobs that open it.
pub(super) fn check_unreadable_directory() -> Result<()> {
    let directory = UserDirectory::new()?;
    // Root reads everything but without these rights: only the home is to lack them.
    let home = directory.write_file(
        "bafs-with-a-modest-home",
        &format!(
            "#!/bin/sh\ncase \" $* \" in *' home '*) exec setpriv \
             --bounding-set=-dac_override,-dac_read_search {0} \"$@\";; esac\nexec {0} \"$@\"\n",
            crate::bafs_program().display()
        ),
    )?;
    set_mode(&home, 0o755)?;
    let world = TestCluster::start_with_spec(&["100MB"], |spec| spec.program = home)?;
    world.wait_for_servers(2)?;
    world.write_home("db/seq", b"data\n")?;
    world.write_home("db/lost+found/x", b"secret\n")?;
    let closed = world.home.path().join("db/lost+found");
    std::os::unix::fs::chown(&closed, Some(65_534), Some(65_534))?;
    set_mode(&closed, 0o700)?;
    let text = "volume v cache bafs://home/db 1 MB\nvolume o scratch 1 MB\njob j {\n\
        executable = sh\narguments = -c 'cat /v/seq > /o/r'\n}\nmount v j /v\nmount o j /o\n\
        extract o r bafs://home/r\n";
    let path = world.write_workflow(text)?;
    let output = world.bafs_command(&["run"]).arg(&path).output()?;
    ensure!(
        output.status.success(),
        super::user_directory::last_lines(&crate::printed_text(&output))
    );
    ensure!(world.read_home("r")? == b"data\n", "the result is wrong");
    Ok(())
}

pub(super) fn set_mode(path: &std::path::Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = Mode::from_bits_truncate(mode).bits();
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions).with_context(|| path.display().to_string())
}
