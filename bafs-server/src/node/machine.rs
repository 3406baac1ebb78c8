//! What a node says of its machine in its advert. Measured once, at the start: nothing here changes
//! while a machine runs.

use bafs_proto::attributes::{AttributeValue, Attributes};

use crate::executor::machine_memory_bytes;

/// The attributes of this machine, and those of its administrator, which go before.
///
/// | Name | Value |
/// |---|---|
/// | `architecture` | of the processor, as Rust names it: `x86_64`, `aarch64` |
/// | `kernel` | release of the kernel, as `uname -r` prints it |
/// | `memory_bytes` | of the machine, or of its container |
/// | `operating_system` | `linux` |
/// | `processors` | that the node may use |
/// | `temporary_bytes` | for the temporary files of one job |
/// | `version` | of BAFS |
pub(super) fn describe_machine(temporary_bytes: u64, by_administrator: &Attributes) -> Attributes {
    let text = |text: &str| AttributeValue::Text(text.to_owned());
    let integer = |value: u64| AttributeValue::Integer(i64::try_from(value).unwrap_or(i64::MAX));
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = rustix::system::uname();
    let mut attributes = Attributes::default();
    attributes.set("architecture", text(std::env::consts::ARCH));
    attributes.set("kernel", text(&kernel.release().to_string_lossy()));
    attributes.set("memory_bytes", integer(machine_memory_bytes()));
    attributes.set("operating_system", text(std::env::consts::OS));
    attributes.set("processors", integer(processors as u64));
    attributes.set("temporary_bytes", integer(temporary_bytes));
    attributes.set("version", text(env!("CARGO_PKG_VERSION")));
    for (name, value) in by_administrator.iter() {
        attributes.set(name, value.clone());
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_the_administrator_go_before() {
        let mut own = Attributes::default();
        own.set("processors", AttributeValue::Integer(3));
        own.set("has_gpu", AttributeValue::Boolean(true));
        let all = describe_machine(7, &own);
        assert_eq!(all.get("processors"), Some(&AttributeValue::Integer(3)));
        assert_eq!(all.get("has_gpu"), Some(&AttributeValue::Boolean(true)));
        let temporary = all.get("temporary_bytes");
        assert_eq!(temporary, Some(&AttributeValue::Integer(7)));
        let memory = all.get("memory_bytes");
        assert!(
            matches!(memory, Some(AttributeValue::Integer(1..))),
            "{memory:?}"
        );
        assert!(all.is_well_formed());
    }
}
