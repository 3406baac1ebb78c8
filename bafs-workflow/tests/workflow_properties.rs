//! Properties of the workflow language on generated input: it never panics, it is deterministic,
//! its check of shared volumes agrees with the obvious slow one, and it scales.

use std::fmt::Write as _;

use bafs_workflow::{CheckedWorkflow, Workflow, WorkflowRejected, format_workflow, parse_workflow};
use proptest::prelude::*;

const VALID_WORKFLOW: &str = r#"# every statement once
volume db cache bafs://home:9000/db 1.5 GB mru files 20
volume in scratch 10MB from file:///in
for i in 1..3
  volume raw$(i) scratch 100 MB files 10
  job align$(i) {
    executable = blastp
    arguments = -db "/data/db" \
      -query '/in/q$(i:03).fa' $$(x)
    environment = A=1 B="x y"
    request_cpus = 2
    request_memory = 1 GiB
    runtime = 5 min
    output = raw
    retry = 2
  }
  job sum$(i) sum.job
  parent align$(i) child sum$(i)
  mount db align$(i) /data ro
  mount in align$(i) /in ro
  mount raw$(i) align$(i) /scratch rw
  mount raw$(i) sum$(i) /scratch
  extract raw$(i) summary bafs://home/out/summary.$(i)
  for x in a b
    job end$(i)$(x) sum.job
  end
end
template run name threads=2 {
  script = <<END
    set -- $(name) $(date) $((1 + 2))
    echo $(upper(name)) "$@"
  END
  environment = T=$(threads)
  produces = /w/x
}
for s in A B
  volume w$(s) scratch 1 MB
  job run$(s) from run name=$(s) {
    interpreter = bash -e
  }
  mount w$(s) run$(s) /w
end
include "more.bafs"
retry sum1 3
"#;

const FRAGMENTS: [&str; 34] = [
    "\n",
    " ",
    "\"",
    "'",
    "\\",
    "#",
    "{",
    "}",
    "$(",
    "$(i)",
    "$(i:",
    ")",
    "=",
    "..",
    "for i in ",
    "end\n",
    "job a ",
    "volume v ",
    "mount v a ",
    "parent a child ",
    "\\\n",
    "\0",
    "\u{feff}",
    "é",
    "://",
    "/",
    " GB",
    "\r\n",
    "<<END",
    "END\n",
    "$(stem(",
    "script = <<",
    " from run ",
    "include ",
];

fn parse_text(text: &str) -> Result<CheckedWorkflow, WorkflowRejected> {
    parse_workflow("t.bafs", text, &|name| match name {
        "more.bafs" => Ok("retry sum2 1\n".to_owned()),
        "sum.job" => Ok("executable = sh\narguments = $(i)\nqueue\n".to_owned()),
        _ => Err("no such file".to_owned()),
    })
}

/// Parses and uses the result in every way that there is.
fn exercise_parser(text: &str) {
    let result = parse_text(text);
    match &result {
        Ok(checked) => {
            assert_eq!(
                checked.workflow.topological_order().len(),
                checked.workflow.jobs.len()
            );
        }
        Err(rejected) => {
            assert!(!rejected.diagnostics.is_empty() && rejected.diagnostics.len() <= 40);
            for diagnostic in &rejected.diagnostics {
                assert!(!diagnostic.with_source(text).contains('\0'));
            }
        }
    }
    assert_eq!(
        result,
        parse_text(text),
        "the same text gives the same result"
    );
    if let (Ok(checked), Ok(formatted)) = (&result, format_workflow("t.bafs", text)) {
        let parsed = parse_text(&formatted).map(|parsed| parsed.workflow);
        assert_eq!(parsed.as_ref(), Ok(&checked.workflow), "{formatted}");
    }
}

#[derive(Debug, Clone)]
enum Mutation {
    Delete(usize, usize),
    Insert(usize, usize),
    DuplicateLine(usize),
    SwapLines(usize, usize),
}

fn any_mutation() -> impl Strategy<Value = Mutation> {
    let at = 0..VALID_WORKFLOW.len();
    prop_oneof![
        (at.clone(), 1..12usize).prop_map(|(at, length)| Mutation::Delete(at, length)),
        (at, 0..FRAGMENTS.len()).prop_map(|(at, which)| Mutation::Insert(at, which)),
        (0..40usize).prop_map(Mutation::DuplicateLine),
        (0..40usize, 0..40usize).prop_map(|(a, b)| Mutation::SwapLines(a, b)),
    ]
}

fn apply_mutation(text: &str, mutation: &Mutation) -> String {
    let characters: Vec<char> = text.chars().collect();
    let split = |at: usize, skip: usize| {
        let at = at.min(characters.len());
        let end = (at + skip).min(characters.len());
        (
            characters[..at].iter().collect::<String>(),
            characters[end..].iter().collect::<String>(),
        )
    };
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    let count = lines.len().max(1);
    match *mutation {
        Mutation::Delete(at, length) => {
            let (before, after) = split(at, length);
            before + &after
        }
        Mutation::Insert(at, which) => {
            let (before, after) = split(at, 0);
            before + FRAGMENTS[which] + &after
        }
        Mutation::DuplicateLine(line) if !lines.is_empty() => {
            lines.insert(line % count, lines[line % count]);
            lines.concat()
        }
        Mutation::SwapLines(a, b) if !lines.is_empty() => {
            lines.swap(a % count, b % count);
            lines.concat()
        }
        _ => text.to_owned(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn arbitrary_text_never_panics(text in any::<String>()) {
        exercise_parser(&text);
    }

    #[test]
    fn arbitrary_fragments_never_panic(
        parts in prop::collection::vec(0..FRAGMENTS.len(), 0..60),
    ) {
        exercise_parser(&parts.into_iter().map(|part| FRAGMENTS[part]).collect::<String>());
    }

    #[test]
    fn mutations_never_panic(mutations in prop::collection::vec(any_mutation(), 1..6)) {
        let valid = VALID_WORKFLOW.to_owned();
        exercise_parser(&mutations.iter().fold(valid, |text, m| apply_mutation(&text, m)));
    }

    #[test]
    fn shared_volume_check_agrees_with_pairwise_check(
        count in 2..9usize,
        edges in prop::collection::vec((0..9usize, 0..9usize), 0..16),
        // For each job: not used, read, written.
        uses in prop::collection::vec(0..3u8, 9),
        shuffle in any::<u64>(),
    ) {
        // Names do not follow the order of the graph, or a wrong sort would go unseen.
        let name = |job: usize| format!("j{}", (job as u64 * 7 + shuffle % 9) % 9);
        let mut text = "volume v scratch 1 MB\n".to_owned();
        for declared in 0..9 {
            if let Some(job) = (0..count).find(|&job| name(job) == format!("j{declared}")) {
                writeln!(text, "job {} {{\nexecutable = true\n}}", name(job)).unwrap();
            }
        }
        let mut before = vec![vec![false; count]; count];
        for &(a, b) in &edges {
            if a < b && b < count {
                before[a][b] = true;
                writeln!(text, "parent {} child {}", name(a), name(b)).unwrap();
            }
        }
        for middle in 0..count {
            for a in 0..count {
                for b in 0..count {
                    before[a][b] |= before[a][middle] && before[middle][b];
                }
            }
        }
        let uses = &uses[..count];
        for (job, used) in uses.iter().enumerate().filter(|(_, used)| **used > 0) {
            let access = if *used == 1 { "ro" } else { "rw" };
            writeln!(text, "mount v {} /w {access}", name(job)).unwrap();
        }
        let mut expected = true;
        for a in 0..count {
            for b in (0..count).filter(|&b| b != a && uses[a] > 0 && uses[b] > 0) {
                let conflict = uses[a] == 2 || uses[b] == 2;
                expected &= !conflict || before[a][b] || before[b][a];
            }
            let written = (0..count).any(|writer| uses[writer] == 2 && before[writer][a]);
            expected &= uses[a] != 1 || written;
        }
        prop_assert_eq!(parse_text(&text).is_ok(), expected, "{}", text);
    }
}

#[test]
fn reference_text_is_valid() {
    let checked = parse_text(VALID_WORKFLOW).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        (checked.workflow.jobs.len(), checked.workflow.volumes.len()),
        (14, 7)
    );
}

#[test]
fn deep_nesting_and_long_lines_never_panic() {
    exercise_parser(&"for i in 1\n".repeat(20_000));
    exercise_parser(&format!(
        "{}{}",
        "for i in 1\n".repeat(20_000),
        "end\n".repeat(20_000)
    ));
    exercise_parser(&"\\".repeat(50_000));
    exercise_parser(&format!("parent{} child b", " a".repeat(100_000)));
    exercise_parser(&"$(".repeat(50_000));
    exercise_parser(&"job a {\n".repeat(20_000));
}

/// Pipelines of four jobs with a volume of their own, one batch volume for all, a first job that
/// fills an index for all and a last one that waits for all: any check that looks at pairs of
/// users, or walks through the fan, would take hours.
#[test]
fn two_hundred_thousand_jobs_are_checked() {
    let text = "
volume db bafs://home/db 10 GB
volume index scratch 1 GB
job first {
  executable = make-index
}
job last {
  executable = clean-index
}
mount index first /index
mount index last /index
for i in 1..50000
  volume p$(i) scratch 10 MB
  for s in 1..4
    job j$(i).$(s) {
      executable = stage$(s)
      arguments = --in /scratch/$(i) --out '/scratch/$(i:06)'
      runtime = 5 min
    }
    mount db j$(i).$(s) /db
    mount index j$(i).$(s) /index ro
    mount p$(i) j$(i).$(s) /scratch
  end
  parent first child j$(i).1
  parent j$(i).1 child j$(i).2
  parent j$(i).2 child j$(i).3
  parent j$(i).3 child j$(i).4
  parent j$(i).4 child last
  extract p$(i) out bafs://home/out/$(i)
end
";
    let workflow = parse_text(text).unwrap_or_else(|e| panic!("{e}")).workflow;
    let Workflow {
        jobs,
        volumes,
        extracts,
        ..
    } = &workflow;
    assert_eq!(
        (jobs.len(), volumes.len(), extracts.len()),
        (200_002, 50_002, 50_000)
    );
    assert_eq!(jobs[1].parents.len(), 50_000);
    let order = workflow.topological_order();
    assert_eq!((order[0].0, order[200_001].0), (0, 1));

    // As many errors as statements: none may cost a look at all names.
    let wrong = text.replace("mount db j", "mount db x");
    let rejected = parse_text(&wrong).unwrap_err();
    assert_eq!(
        rejected.diagnostics.len(),
        1,
        "one error stands for all turns: {rejected}"
    );
    let mut unrolled = String::new();
    for i in 0..50_000 {
        writeln!(
            unrolled,
            "job a{i} {{\nexecutable = true\n}}\nmount db b{i} /x"
        )
        .unwrap();
    }
    assert_eq!(parse_text(&unrolled).unwrap_err().errors_omitted, 99_980);
}
