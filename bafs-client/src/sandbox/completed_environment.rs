//! What a job's environment takes from the root that it is in: variables of its image, and where
//! the workflow's programs are. Starts nothing.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use bafs_proto::image::{IMAGE_DESCRIPTION_BYTES_MAX, IMAGE_DESCRIPTION_FILE, ImageDescription};
use bafs_proto::path::PROGRAM_DIRECTORY;

use super::executable::SEARCH_PATH_DEFAULT;
use super::plan::JobPlan;

/// Where programs of an image are when it does not say: what container engines take.
const IMAGE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables, each with its value.
type Variables = [(OsString, OsString)];

/// The environment of a job whose root is this process's.
pub(super) fn complete_environment(plan: &JobPlan) -> Cow<'_, Variables> {
    let mut environment = Cow::Borrowed(plan.environment.as_slice());
    if plan.root().is_some() {
        let described = read_description().unwrap_or_default();
        add_image_variables(environment.to_mut(), described);
    }
    let is_program = |path: &Path| path.parent() == Some(Path::new(PROGRAM_DIRECTORY));
    if plan.volumes.iter().any(|volume| is_program(&volume.path)) {
        put_programs_first(environment.to_mut());
    }
    environment
}

/// What the image in `/` says of itself; nothing where it says nothing that can be read.
fn read_description() -> Option<ImageDescription> {
    let file = File::open(Path::new("/").join(IMAGE_DESCRIPTION_FILE)).ok()?;
    let mut text = Vec::new();
    file.take(IMAGE_DESCRIPTION_BYTES_MAX)
        .read_to_end(&mut text)
        .ok()?;
    serde_json::from_slice(&text).ok()
}

/// Adds the variables of an image that the job does not set.
fn add_image_variables(environment: &mut Vec<(OsString, OsString)>, described: ImageDescription) {
    let path = ("PATH".to_owned(), IMAGE_PATH.to_owned());
    for (name, value) in described.environment.into_iter().chain([path]) {
        let is_valid = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
        let is_set = environment
            .iter()
            .any(|(known, _)| known == OsStr::new(&name));
        if is_valid && !is_set {
            environment.push((name.into(), value.into()));
        }
    }
}

fn put_programs_first(environment: &mut Vec<(OsString, OsString)>) {
    let mut variables = environment.iter_mut().rev();
    match variables.find(|(name, _)| name == "PATH") {
        Some((_, path)) => {
            let mut longer = OsString::from(PROGRAM_DIRECTORY);
            longer.push(":");
            longer.push(&path);
            *path = longer;
        }
        None => {
            let path = format!("{PROGRAM_DIRECTORY}:{SEARCH_PATH_DEFAULT}");
            environment.push(("PATH".into(), path.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(all: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        all.iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(value)))
            .collect()
    }

    #[test]
    fn jobs_override_variables_of_images() {
        let described = |all: &[(&str, &str)]| ImageDescription {
            environment: all
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            ..ImageDescription::default()
        };
        let mut environment = variables(&[("LANG", "C")]);
        let image = described(&[("LANG", "de"), ("PATH", "/opt/bin"), ("A=B", "x")]);
        add_image_variables(&mut environment, image);
        assert_eq!(
            environment,
            variables(&[("LANG", "C"), ("PATH", "/opt/bin")])
        );
        let mut environment = Vec::new();
        add_image_variables(&mut environment, described(&[]));
        assert_eq!(environment, variables(&[("PATH", IMAGE_PATH)]));
    }

    #[test]
    fn programs_come_first_on_the_path() {
        let mut environment = variables(&[("PATH", "/bin")]);
        put_programs_first(&mut environment);
        assert_eq!(environment, variables(&[("PATH", "/bafs/bin:/bin")]));
        let mut environment = Vec::new();
        put_programs_first(&mut environment);
        let path = environment[0].1.to_str().unwrap_or_default();
        assert!(path.starts_with("/bafs/bin:/usr/local/bin"), "{path}");
    }
}
