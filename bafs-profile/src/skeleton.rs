//! A workflow that does what was traced: roles become volumes, mounts and results. Text only.
//!
//! Each traced directory that is written becomes a scratch volume of each instance, at the same
//! path. Inputs appear in it as links into cache volumes. So commands run as they were traced.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::byte_ranges::ByteRanges;
use crate::instances::group_instances;
use crate::role::{PathUse, Role, collect_path_uses, find_roles};
use crate::trace::Trace;

/// Blocks of cache volumes.
const CACHE_BLOCK_BYTES: u64 = 64 << 10;
/// Where a job sees inputs that cannot be at their own place.
const INPUT_DIRECTORY: &str = "/bafs-inputs";
/// Files beyond which a volume declares how many it holds; a volume takes at least 1024.
const DEFAULT_FILES: usize = 512;

/// A workflow and what it needs to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skeleton {
    /// The text of the workflow.
    pub text: String,
    /// The directory to export as home, if the workflow uses `bafs://home/`.
    pub home: Option<String>,
}

/// A cache volume of inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct InputVolume {
    name: String,
    /// The directory, or the only file.
    source: String,
    is_file: bool,
    bytes: u64,
    role: Role,
}

struct SkeletonWriter<'a> {
    traces: &'a [Trace],
    uses: BTreeMap<String, PathUse>,
    roles: BTreeMap<String, Role>,
    roots: Vec<String>,
    home: Option<String>,
    /// The volume of each input: by instance (empty for batch data) and path.
    input_of: BTreeMap<(String, String), usize>,
    inputs: Vec<InputVolume>,
    text: String,
}

/// Writes the workflow of these traces.
pub fn write_skeleton(traces: &[Trace]) -> Skeleton {
    let mut writer = SkeletonWriter::new(traces);
    writer.collect_inputs();
    writer.raise_home();
    writer.write_head();
    writer.write_inputs();
    for instance in group_instances(traces) {
        writer.write_instance(instance.name, &instance.stages);
    }
    Skeleton {
        text: writer.text,
        home: writer.home,
    }
}

fn parent_of(path: &str) -> &str {
    match path.rfind('/') {
        Some(0) | None => "/",
        Some(at) => &path[..at],
    }
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn is_below(path: &str, directory: &str) -> bool {
    let rest = path.strip_prefix(directory.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The deepest directory above all of these paths.
fn common_directory<'p>(paths: impl Iterator<Item = &'p str>) -> Option<String> {
    let mut common: Option<Vec<&str>> = None;
    for path in paths {
        let names: Vec<&str> = parent_of(path)
            .split('/')
            .filter(|it| !it.is_empty())
            .collect();
        common = Some(match common {
            None => names,
            Some(known) => {
                let same = known
                    .iter()
                    .zip(&names)
                    .take_while(|(one, other)| one == other);
                let length = same.count();
                known[..length].to_vec()
            }
        });
    }
    let names = common.filter(|names| !names.is_empty())?;
    Some(format!("/{}", names.join("/")))
}

/// A word of the workflow language.
fn quote_word(word: &str) -> String {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "/._-+:=,@%".contains(it);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    let mut quoted = String::from('"');
    for letter in word.chars() {
        if matches!(letter, '"' | '\\' | '$') {
            quoted.push('\\');
        }
        quoted.push(letter);
    }
    quoted.push('"');
    quoted
}

/// A word for a shell.
fn quote_shell(word: &str) -> String {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "/._-+:=,@%".contains(it);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A name of the workflow language.
fn to_name(text: &str) -> String {
    let letter = |it: char| match it.is_ascii_alphanumeric() || matches!(it, '_' | '-' | '.') {
        true => it,
        false => '_',
    };
    text.chars().map(letter).collect()
}

/// A size with a quarter more, at least a megabyte more, in whole megabytes.
fn format_size(bytes: u64) -> String {
    let more = bytes.saturating_add((bytes / 4).max(1 << 20));
    format!("{} MB", more.div_ceil(1_000_000))
}

impl<'a> SkeletonWriter<'a> {
    fn new(traces: &'a [Trace]) -> Self {
        let mut roots: Vec<String> = traces.iter().flat_map(|it| it.roots.clone()).collect();
        roots.sort_unstable();
        // A directory comes before those in it.
        roots.dedup_by(|below, above| is_below(below, above));
        let paths = traces.iter().flat_map(|trace| &trace.files);
        let home = common_directory(paths.map(|file| file.path.as_str()));
        Self {
            traces,
            uses: collect_path_uses(traces),
            roles: find_roles(traces),
            roots,
            home,
            input_of: BTreeMap::new(),
            inputs: Vec::new(),
            text: String::new(),
        }
    }

    fn url(&self, path: &str) -> String {
        match &self.home {
            Some(home) => {
                let below = path.strip_prefix(home.as_str()).unwrap_or(path);
                quote_word(&format!("bafs://home/{}", below.trim_start_matches('/')))
            }
            None => quote_word(&format!("file://{path}")),
        }
    }

    /// Whether an instance makes a file itself.
    fn is_own(&self, path: &str, instance: &str) -> bool {
        let known = &self.uses[path];
        known.writers.contains(instance) && !known.modifiers.contains(instance)
    }

    /// The instance that made a file which another one reads.
    fn maker(&self, path: &str, reader: &str) -> Option<&str> {
        let known = &self.uses[path];
        let makers = known
            .writers
            .iter()
            .filter(|it| !known.modifiers.contains(*it));
        let mut others = makers.filter(|it| *it != reader);
        others.next().map(String::as_str)
    }

    /// Files that a trace finds: they must be there for it.
    fn inputs_of(&self, trace: &Trace) -> Vec<String> {
        let found = trace.files.iter().filter(|file| !file.is_created);
        let mut paths: Vec<String> = found.map(|file| file.path.clone()).collect();
        paths.retain(|path| !self.is_own(path, &trace.instance));
        paths.sort_unstable();
        paths.dedup();
        paths
    }

    fn root_of(&self, path: &str) -> Option<usize> {
        self.roots.iter().position(|root| is_below(path, root))
    }

    /// Groups inputs by role, instance and directory into volumes.
    fn collect_inputs(&mut self) {
        let mut groups: BTreeMap<(Role, String, String), BTreeSet<String>> = BTreeMap::new();
        let mut ranges: BTreeMap<String, ByteRanges> = BTreeMap::new();
        for trace in self.traces {
            for path in self.inputs_of(trace) {
                if self.maker(&path, &trace.instance).is_some() {
                    continue;
                }
                let role = self.roles[&path];
                let owner = match role {
                    Role::Batch => String::new(),
                    _ => trace.instance.clone(),
                };
                let directory = parent_of(&path).to_owned();
                groups
                    .entry((role, owner, directory))
                    .or_default()
                    .insert(path);
            }
            for access in trace.accesses.iter().filter(|it| it.kind.is_read()) {
                let path = trace.files[access.file as usize].path.clone();
                ranges.entry(path).or_default().insert(access.range());
            }
        }
        for ((role, owner, directory), paths) in groups {
            let number = self.inputs.len() + 1;
            let name = match role {
                Role::Batch => format!("batch{number}"),
                _ => format!("in{number}_{}", to_name(&owner)),
            };
            let blocks = |path: &String| {
                let ranges = ranges.get(path);
                ranges.map_or(0, |it| {
                    it.count_blocks(CACHE_BLOCK_BYTES) * CACHE_BLOCK_BYTES
                })
            };
            let bytes = paths.iter().map(blocks).sum();
            let only = paths.first().filter(|_| paths.len() == 1).cloned();
            self.inputs.push(InputVolume {
                name,
                is_file: only.is_some(),
                source: only.unwrap_or(directory),
                bytes,
                role,
            });
            for path in paths {
                self.input_of.insert((owner.clone(), path), number - 1);
            }
        }
    }

    /// Exports the directory above, if a cache would show all of home and results go below it.
    fn raise_home(&mut self) {
        let Some(home) = self.home.clone() else {
            return;
        };
        let is_cache = self
            .inputs
            .iter()
            .any(|it| !it.is_file && it.source == home);
        let is_written = self.uses.values().any(|it| !it.writers.is_empty());
        let above = parent_of(&home);
        if is_cache && is_written && above != "/" {
            self.home = Some(above.to_owned());
        }
    }

    fn write_line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn write_head(&mut self) {
        self.write_line("# A skeleton that `bafs profile` wrote from traces. It runs as it is:");
        let export = match &self.home {
            Some(home) => format!(" --export {}", quote_shell(home)),
            None => String::new(),
        };
        self.write_line("#");
        self.write_line(&format!("#     bafs run THIS-FILE --local 2{export}"));
        self.write_line("#");
        self.write_line("# Names, loops and shorter paths are left to you.");
    }

    fn write_inputs(&mut self) {
        self.write_line("");
        for at in 0..self.inputs.len() {
            let input = self.inputs[at].clone();
            let line = format!(
                "volume {} cache {} {}  # {}",
                input.name,
                self.url(&input.source),
                format_size(input.bytes),
                input.role.name()
            );
            self.write_line(&line);
        }
    }

    fn scratch_name(instance: &str, root: usize) -> String {
        format!("work{}_{}", root + 1, to_name(instance))
    }

    fn job_name(instance: &str, position: usize) -> String {
        format!("{}_{}", to_name(instance), position + 1)
    }

    /// The roots of which an instance uses files: each is a scratch volume.
    fn scratch_roots(&self, stages: &[&Trace]) -> BTreeSet<usize> {
        let files = stages.iter().flat_map(|trace| &trace.files);
        files.filter_map(|file| self.root_of(&file.path)).collect()
    }

    fn write_instance(&mut self, instance: &str, stages: &[&Trace]) {
        self.write_line("");
        self.write_line(&format!("# Instance {instance}"));
        let scratch = self.scratch_roots(stages);
        for root in &scratch {
            let (bytes, files) = self.measure_scratch(instance, stages, *root);
            let mut line = format!(
                "volume {} scratch {}",
                Self::scratch_name(instance, *root),
                format_size(bytes)
            );
            if files > DEFAULT_FILES {
                let _ = write!(line, " files {}", files * 2);
            }
            self.write_line(&format!("{line}  # pipeline data and results"));
        }
        for (position, trace) in stages.iter().enumerate() {
            self.write_job(instance, position, trace, &scratch);
        }
        for position in 1..stages.len() {
            let [before, after] = [position - 1, position].map(|at| Self::job_name(instance, at));
            self.write_line(&format!("parent {before} child {after}"));
        }
        self.write_extracts(instance, stages);
    }

    fn measure_scratch(&self, instance: &str, stages: &[&Trace], root: usize) -> (u64, usize) {
        let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
        for file in stages.iter().flat_map(|trace| &trace.files) {
            if self.root_of(&file.path) != Some(root) {
                continue;
            }
            let is_here = self.uses[&file.path].writers.contains(instance);
            let size = sizes.entry(&file.path).or_default();
            *size = (*size).max(if is_here { file.size_bytes_max } else { 0 });
        }
        (sizes.values().sum(), sizes.len())
    }

    fn write_job(
        &mut self,
        instance: &str,
        position: usize,
        trace: &Trace,
        scratch: &BTreeSet<usize>,
    ) {
        let job = Self::job_name(instance, position);
        let (mut mounts, mut lines) = (BTreeMap::new(), Vec::new());
        let mut parents = BTreeSet::new();
        for line in self.directories_of(instance, trace, scratch) {
            lines.push(format!("mkdir -p {}", quote_shell(&line)));
        }
        for (path, target) in &trace.links {
            if self.root_of(path).is_some() {
                let words = [target, path].map(|word| quote_shell(word));
                lines.push(format!("ln -sfn {}", words.join(" ")));
            }
        }
        for path in self.inputs_of(trace) {
            let place = self.place_of_input(&path, instance, &mut mounts, &mut parents);
            let words = [place, path.clone()]
                .map(|word| quote_shell(&word))
                .join(" ");
            let is_modified = self.uses[&path].modifiers.contains(instance);
            lines.push(match is_modified {
                // A later stage must not undo what an earlier one changed.
                true => format!("test -e {} || cp {words}", quote_shell(&path)),
                false => format!("ln -sfn {words}"),
            });
        }
        lines.push(format!("cd {}", quote_shell(&trace.directory)));
        let words: Vec<String> = trace.command.iter().map(|word| quote_shell(word)).collect();
        lines.push(format!("exec {}", words.join(" ")));
        self.write_line(&format!("job {job} {{"));
        self.write_line(&format!(
            "  runtime = {} s",
            trace.wall_us.div_ceil(1_000_000).max(1)
        ));
        self.write_line("  script  = <<'BAFS_END'");
        for line in lines.iter().flat_map(|line| line.split('\n')) {
            self.write_line(&format!("    {line}"));
        }
        self.write_line("  BAFS_END");
        self.write_line("}");
        for root in scratch {
            let name = Self::scratch_name(instance, *root);
            let path = quote_word(&self.roots[*root]);
            self.write_line(&format!("mount {name} {job} {path}"));
        }
        for (volume, path) in mounts {
            self.write_line(&format!("mount {volume} {job} {} ro", quote_word(&path)));
        }
        for parent in parents {
            self.write_line(&format!("parent {parent} child {job}"));
        }
    }

    /// Where a job finds an input; adds what it must mount, and what it must wait for.
    fn place_of_input(
        &self,
        path: &str,
        instance: &str,
        mounts: &mut BTreeMap<String, String>,
        parents: &mut BTreeSet<String>,
    ) -> String {
        if let Some(maker) = self.maker(path, instance) {
            let root = self.root_of(path).unwrap_or(0);
            let volume = Self::scratch_name(maker, root);
            let below = path[self.roots[root].len()..].trim_start_matches('/');
            let directory = format!("{INPUT_DIRECTORY}/{volume}");
            let makers = group_instances(self.traces);
            let stages = makers.iter().find(|it| it.name == maker);
            let last = stages.map_or(1, |it| it.stages.len()) - 1;
            parents.insert(Self::job_name(maker, last));
            mounts.insert(volume, directory.clone());
            return format!("{directory}/{below}");
        }
        let owner = match self.roles[path] {
            Role::Batch => "",
            _ => instance,
        };
        let input = &self.inputs[self.input_of[&(owner.to_owned(), path.to_owned())]];
        let directory = format!("{INPUT_DIRECTORY}/{}", input.name);
        mounts.insert(input.name.clone(), directory.clone());
        format!("{directory}/{}", name_of(path))
    }

    /// Directories that a command finds, and does not make itself.
    fn directories_of(
        &self,
        instance: &str,
        trace: &Trace,
        scratch: &BTreeSet<usize>,
    ) -> BTreeSet<String> {
        let made: BTreeSet<&String> = {
            let own = self.traces.iter().filter(|it| it.instance == instance);
            own.flat_map(|it| &it.made_directories).collect()
        };
        let files = trace.files.iter().map(|file| parent_of(&file.path));
        let links = trace.links.iter().map(|(path, _)| parent_of(path));
        let used = trace.used_directories.iter().map(String::as_str);
        let wanted = files
            .chain(links)
            .chain(used)
            .chain([trace.directory.as_str()]);
        let is_found = |directory: &&str| {
            let mut above = made.iter().filter(|it| is_below(directory, it));
            let root = self.root_of(directory);
            root.is_some_and(|root| scratch.contains(&root)) && above.next().is_none()
        };
        wanted.filter(is_found).map(str::to_owned).collect()
    }

    /// The path of a result at home: that of the file, or one beside it if several instances write
    /// it. A result below a directory of inputs goes elsewhere, because a workflow never changes
    /// the source of its caches.
    fn result_path(&self, path: &str, instance: &str) -> String {
        let target = match self.uses[path].writers.len() {
            1 => path.to_owned(),
            _ => {
                let (directory, name) = (parent_of(path), name_of(path));
                format!("{directory}/{}/{name}", to_name(instance))
            }
        };
        let mut sources = self.inputs.iter().filter(|input| !input.is_file);
        if !sources.any(|input| is_below(&target, &input.source)) {
            return target;
        }
        let home = self.home.as_deref().unwrap_or("/");
        let below = path.strip_prefix(home).unwrap_or(path);
        format!(
            "{home}/results/{}/{}",
            to_name(instance),
            below.trim_start_matches('/')
        )
    }

    fn write_extracts(&mut self, instance: &str, stages: &[&Trace]) {
        let mut last: BTreeMap<&str, bool> = BTreeMap::new();
        for file in stages.iter().flat_map(|trace| &trace.files) {
            last.insert(&file.path, file.is_removed);
        }
        let kept = last.into_iter().filter(|(_, is_removed)| !is_removed);
        let paths: Vec<&str> = kept.map(|(path, _)| path).collect();
        for path in paths {
            let known = &self.uses[path];
            let Some(root) = self.root_of(path) else {
                continue;
            };
            if !known.writers.contains(instance) {
                continue;
            }
            let below = path[self.roots[root].len()..]
                .trim_start_matches('/')
                .to_owned();
            let target = self.result_path(path, instance);
            let line = format!(
                "extract {} {} {}",
                Self::scratch_name(instance, root),
                quote_word(&below),
                self.url(&target)
            );
            match self.roles[path] {
                Role::Pipeline => self.write_line(&format!("# {line}  # pipeline data")),
                _ => self.write_line(&line),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::AccessKind;
    use crate::trace_builder::{DataOperation, TraceBuilder};

    fn stage(instance: &str, reads: &[&str], writes: &[&str]) -> Trace {
        let mut builder = TraceBuilder::default();
        let reads = reads.iter().map(|path| (path, AccessKind::Read));
        let writes = writes.iter().map(|path| (path, AccessKind::Write));
        for (handle, (path, kind)) in reads.chain(writes).enumerate() {
            let handle = handle as u64;
            builder.record_open(0, "p", (path, 10), handle, kind.is_write());
            let operation = DataOperation {
                handle,
                kind,
                offset: 0,
                bytes: 10,
            };
            builder.record_data(0, operation);
            builder.forget_handle(handle);
        }
        Trace {
            instance: instance.to_owned(),
            command: vec![
                "sh".to_owned(),
                "-c".to_owned(),
                "echo $(date)\nls".to_owned(),
            ],
            directory: "/data/w".to_owned(),
            roots: vec!["/data/w".to_owned(), "/data/db".to_owned()],
            ..builder.finish()
        }
    }

    #[test]
    fn results_stay_out_of_input_directories() {
        let mut traces = Vec::new();
        for name in ["a", "b"] {
            let reads = ["one", "two", "three"].map(|it| format!("/data/w/in/{it}"));
            let reads = reads.each_ref().map(String::as_str);
            traces.push(stage(name, &reads, &["/data/w/in/two"]));
        }
        let text = write_skeleton(&traces).text;
        let read = |_: &str| Err("no files".to_owned());
        let checked = bafs_workflow::parse_workflow("s.bafs", &text, &read);
        let checked = checked.map_err(|it| format!("{it:?}\n{text}")).unwrap();
        let targets = checked
            .workflow
            .extracts
            .iter()
            .map(|it| it.target.to_string());
        let targets: Vec<String> = targets.collect();
        let expected = ["a", "b"].map(|it| format!("bafs://home/results/{it}/in/two"));
        assert_eq!(targets, expected, "{text}");
    }

    #[test]
    fn skeletons_are_valid_workflows() {
        let mut traces = Vec::new();
        for name in ["a", "b"] {
            let of = |end: &str| format!("/data/w/{name}.{end}");
            traces.push(stage(
                name,
                &["/data/db/x", "/data/db/y", &of("in")],
                &[&of("raw")],
            ));
            traces.push(stage(name, &[&of("raw")], &[&of("out")]));
        }
        traces.push(stage(
            "join",
            &["/data/w/a.out", "/data/w/b.out"],
            &["/data/w/all"],
        ));
        let skeleton = write_skeleton(&traces);
        assert_eq!(skeleton.home.as_deref(), Some("/data"));
        let read = |_: &str| Err("no files".to_owned());
        let checked = bafs_workflow::parse_workflow("s.bafs", &skeleton.text, &read);
        let checked = checked.map_err(|it| format!("{it:?}\n{}", skeleton.text));
        let workflow = checked.unwrap().workflow;
        assert_eq!(workflow.jobs.len(), 5);
        let parents = &workflow.jobs[4].parents;
        assert_eq!(parents.len(), 2, "{}", skeleton.text);
        let results: Vec<&str> = workflow
            .extracts
            .iter()
            .map(|it| it.path.as_str())
            .collect();
        assert_eq!(results, ["all"], "{}", skeleton.text);
    }
}
