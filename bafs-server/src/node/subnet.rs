//! The group of a node that was given none: its subnet. Knows no interface.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Nodes of this machine alone, and the others that it has.
const LOOPBACK: &str = "loopback";

/// Bits of an address that name its subnet, as sites number them.
const V4_BITS: u32 = 24;
const V6_BITS: u32 = 64;

/// Names the subnet of an address `host:port`; a name that is no number is its own.
pub(super) fn subnet_of(address: &str) -> String {
    let Ok(socket) = address.parse::<SocketAddr>() else {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        return host.to_owned();
    };
    match socket.ip().to_canonical() {
        ip if ip.is_loopback() => LOOPBACK.to_owned(),
        IpAddr::V4(ip) => {
            let [a, b, c, _] = ip.octets();
            format!("{a}.{b}.{c}.0/{V4_BITS}")
        }
        IpAddr::V6(ip) => {
            let network = ip.to_bits() >> (128 - V6_BITS) << (128 - V6_BITS);
            format!("{}/{V6_BITS}", Ipv6Addr::from_bits(network))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_one_subnet_are_one_group() {
        for (address, group) in [
            ("10.1.2.3:7002", "10.1.2.0/24"),
            ("10.1.2.200:9", "10.1.2.0/24"),
            ("10.1.3.3:7002", "10.1.3.0/24"),
            ("127.0.0.1:7002", "loopback"),
            ("127.0.0.9:1", "loopback"),
            ("[::1]:7002", "loopback"),
            ("[2001:db8:1:2:3::4]:7002", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2:ffff::9]:1", "2001:db8:1:2::/64"),
            ("[::ffff:10.1.2.7]:7002", "10.1.2.0/24"),
            ("host.example:7002", "host.example"),
        ] {
            assert_eq!(subnet_of(address), group, "{address}");
        }
    }
}
