//! Roots of jobs, and programs that travel.

use bafs_workflow::{
    JobIndex, ListedEntry, LocatedFile, Sources, VolumeIndex, Workflow, parse_workflow,
    parse_workflow_with,
};

fn reject_description_files(name: &str) -> Result<String, String> {
    Err(format!("no file {name} in this test"))
}

fn parse_text(text: &str) -> Workflow {
    parse_workflow("dir/test.bafs", text, &reject_description_files)
        .unwrap_or_else(|e| panic!("{e}"))
        .workflow
}

#[test]
fn roots_are_mounts_at_the_top() {
    let text = "volume image cache bafs://h/image 1 GB\nvolume w scratch 1 MB\n\
                root image a b\nmount w a /w\n\
                job a {\nexecutable = tool\noutput = log\n}\njob b {\nexecutable = tool\n}\n";
    let workflow = parse_text(text);
    let root = workflow.jobs[0].root().expect("a root");
    assert_eq!((root.volume, root.path.as_str()), (VolumeIndex(0), "/"));
    assert!(!root.writable);
    let innermost = |path| workflow.jobs[0].mount_at(path).map(|it| it.volume);
    assert_eq!(innermost("/w/x"), Some(VolumeIndex(1)));
    assert_eq!(innermost("/usr/bin/x"), Some(VolumeIndex(0)));
    assert_eq!(innermost("/tmp/x"), None, "what each job has of its own");
    assert_eq!(workflow.jobs[0].command.stdout.as_deref(), Some("/w/log"));
    assert_eq!(workflow.volumes[0].users, [JobIndex(0), JobIndex(1)]);
}

#[test]
fn jobs_have_one_root() {
    let text = "volume one cache bafs://h/one 1 GB\nvolume two cache bafs://h/two 1 GB\n\
                root one a\nroot two a\njob a {\nexecutable = x\noutput = /etc/log\n}\n";
    let rejected = parse_workflow("t.bafs", text, &reject_description_files).unwrap_err();
    let told = rejected.to_string();
    assert!(
        told.contains("job 'a' has the root 'one' already"),
        "{told}"
    );
    assert!(told.contains("but 'one' is read-only there"), "{told}");
}

/// Files beside a workflow.
struct Beside(&'static [&'static str]);

impl Sources for Beside {
    fn read(&self, path: &str, _: usize) -> Result<String, String> {
        reject_description_files(path)
    }

    fn list(
        &self,
        _: &str,
        _: usize,
        _: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        Ok(Vec::new())
    }

    fn locate(&self, path: &str) -> Result<LocatedFile, String> {
        let url = format!("bafs://home/{path}");
        match self.0.contains(&path) {
            true => Ok(LocatedFile {
                url: url.parse().expect("a URL"),
                bytes: 70_000,
            }),
            false => Err("no such file".to_owned()),
        }
    }
}

#[test]
fn programs_travel_to_jobs_that_run_them() {
    let text = "program tool from https://example.org/tool 5 MB\n\
                program near from bin/near\nprogram unused from bin/near\n\
                job a {\nexecutable = tool\n}\n\
                job b {\nscript = <<END\ntool x | near\nEND\n}\n\
                job c {\nexecutable = ./run.sh\n}\njob d {\nexecutable = ./other.sh\n}\n\
                job e {\nexecutable = ./run.sh\n}\n";
    let files = Beside(&["dir/bin/near", "dir/run.sh"]);
    let checked = parse_workflow_with("dir/t.bafs", text, &files).unwrap_or_else(|e| panic!("{e}"));
    let workflow = checked.workflow;
    let mounted: Vec<Vec<(&str, &str)>> = workflow
        .jobs
        .iter()
        .map(|job| {
            let mounts = job.mounts.iter();
            let named = mounts.map(|mount| {
                let volume = &workflow.volume(mount.volume).name;
                (volume.as_str(), mount.path.as_str())
            });
            named.collect()
        })
        .collect();
    let tool = ("bafs-bin-tool", "/bafs/bin/tool");
    let script = ("bafs-scripts-run.sh", "/bafs/scripts/run.sh");
    assert_eq!(
        mounted,
        [
            vec![tool],
            vec![("bafs-bin-near", "/bafs/bin/near"), tool],
            vec![script],
            vec![],
            vec![script]
        ]
    );
    let command = |job: usize| workflow.jobs[job].command.executable.as_str();
    assert_eq!((command(0), command(2)), ("tool", "/bafs/scripts/run.sh"));
    assert_eq!(command(3), "./other.sh", "a file of the job's directory");
    let sizes = workflow.volumes.iter().map(|volume| volume.size_bytes);
    assert_eq!(sizes.collect::<Vec<_>>(), [5_000_000, 131_072, 131_072]);
    let warnings: Vec<_> = checked.warnings.iter().map(|it| &it.message).collect();
    assert_eq!(warnings, ["no job runs the program 'unused'"]);
    let missing = "program x from bin/x\njob a {\nexecutable = x\n}\n";
    let rejected = parse_workflow_with("t.bafs", missing, &files).unwrap_err();
    let told = rejected.to_string();
    assert!(
        told.contains("'bin/x' cannot be brought: no such file"),
        "{told}"
    );
}

#[test]
fn scripts_of_interpreters_travel_to_their_jobs() {
    let text = "for s in 1..2\njob a$(s) {\nexecutable = python3\n\
                arguments = -u count.py in $(s)\n}\nend\n\
                job b {\nexecutable = /bin/sh\narguments = ./bin/run.sh count.py\n}\n\
                job c {\nexecutable = cat\narguments = count.py\n}\n\
                job d {\nexecutable = sh\narguments = /w/run.sh\n}\n\
                job e {\nexecutable = sh\narguments = other.sh\n}\n";
    let files = Beside(&["dir/count.py", "dir/bin/run.sh"]);
    let checked = parse_workflow_with("dir/t.bafs", text, &files).unwrap_or_else(|e| panic!("{e}"));
    let workflow = checked.workflow;
    let told: Vec<(String, usize)> = workflow
        .jobs
        .iter()
        .map(|job| (job.command.arguments.join(" "), job.mounts.len()))
        .collect();
    let expected = [
        ("-u /bafs/scripts/count.py in 1", 1),
        ("-u /bafs/scripts/count.py in 2", 1),
        ("/bafs/scripts/bin/run.sh count.py", 1),
        ("count.py", 0),
        ("/w/run.sh", 0),
        ("other.sh", 0),
    ];
    let expected = expected.map(|(words, mounts)| (words.to_owned(), mounts));
    assert_eq!(told, expected);
    assert_eq!(workflow.volumes.len(), 2, "jobs share what travels");
}
