//! Which addresses may be dialled.
//!
//! The rules apply to the address of each connection, after the name was resolved: a name that is
//! checked and then resolved again could lead elsewhere. An IPv6 address that contains an IPv4
//! address must be allowed as both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::failure::{Failure, Result};

/// What is reached through an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The internet.
    Public,
    /// A private network: RFC 1918, unique local, shared and similar ranges.
    Private,
    /// Refused always, for the reason that is named.
    Refused(&'static str),
}

/// A prefix of addresses, such as `10.0.0.0/8`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Net {
    address: IpAddr,
    bits: u8,
}

impl Net {
    const fn v4(a: u8, b: u8, c: u8, d: u8, bits: u8) -> Net {
        Net {
            address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            bits,
        }
    }

    const fn v6(first: [u16; 4], bits: u8) -> Net {
        let [a, b, c, d] = first;
        Net {
            address: IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)),
            bits,
        }
    }

    /// Whether an address is in this network.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let shift = 32 - u32::from(self.bits);
                let head = |ip: Ipv4Addr| u64::from(ip.to_bits()) >> shift;
                head(own) == head(other)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let shift = 128 - u32::from(self.bits);
                let head = |ip: Ipv6Addr| ip.to_bits().checked_shr(shift).unwrap_or(0);
                head(own) == head(other)
            }
            _ => false,
        }
    }
}

impl std::str::FromStr for Net {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Net, String> {
        let wrong = || format!("{text:?} is neither an address nor a network such as 10.0.0.0/8");
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            Some(bits) => bits.parse().ok().filter(|bits| *bits <= most),
            None => Some(most),
        };
        let bits = bits.ok_or_else(wrong)?;
        Ok(Net { address, bits })
    }
}

const LOOPBACK: Reach = Reach::Refused("it is a loopback address");
const LINK_LOCAL: Reach = Reach::Refused("it is a link-local address, where metadata services are");
const METADATA: Reach = Reach::Refused("it is the address of a metadata service of a cloud");
const MULTICAST: Reach = Reach::Refused("it is a multicast address");
const UNSPECIFIED: Reach = Reach::Refused("it is an unspecified address");
const RESERVED: Reach = Reach::Refused("it is a reserved address");
const TRANSLATED: Reach =
    Reach::Refused("it is of the local NAT64 range, in which other addresses are hidden");

/// Networks with a meaning of their own, the first that contains an address decides. All others are
/// public. From the registries of special-purpose addresses (RFC 6890), and the documentation of
/// clouds for what is not in them.
const NETWORKS: &[(Net, Reach)] = &[
    (Net::v4(169, 254, 0, 0, 16), LINK_LOCAL),
    (Net::v4(127, 0, 0, 0, 8), LOOPBACK),
    (Net::v4(0, 0, 0, 0, 8), UNSPECIFIED),
    (Net::v4(224, 0, 0, 0, 4), MULTICAST),
    (Net::v4(240, 0, 0, 0, 4), RESERVED),
    // Alibaba Cloud, Oracle Cloud, Azure: metadata outside of link-local ranges.
    (Net::v4(100, 100, 100, 200, 32), METADATA),
    (Net::v4(192, 0, 0, 192, 32), METADATA),
    (Net::v4(168, 63, 129, 16, 32), METADATA),
    (Net::v4(10, 0, 0, 0, 8), Reach::Private),
    (Net::v4(172, 16, 0, 0, 12), Reach::Private),
    (Net::v4(192, 168, 0, 0, 16), Reach::Private),
    (Net::v4(100, 64, 0, 0, 10), Reach::Private),
    (Net::v4(192, 0, 0, 0, 24), Reach::Private),
    (Net::v4(198, 18, 0, 0, 15), Reach::Private),
    (Net::v6([0xfe80, 0, 0, 0], 10), LINK_LOCAL),
    (Net::v6([0xff00, 0, 0, 0], 8), MULTICAST),
    (Net::v6([0x64, 0xff9b, 1, 0], 48), TRANSLATED),
    // AWS (fd00:ec2::254 and its neighbours), Oracle Cloud, Scaleway, Google Cloud.
    (Net::v6([0xfd00, 0xec2, 0, 0], 32), METADATA),
    (Net::v6([0xfd00, 0xc1, 0, 0], 32), METADATA),
    (Net::v6([0xfd00, 0x42, 0, 0], 32), METADATA),
    (Net::v6([0xfd20, 0xce, 0, 0], 32), METADATA),
    (Net::v6([0xfc00, 0, 0, 0], 7), Reach::Private),
    (Net::v6([0xfec0, 0, 0, 0], 10), Reach::Private),
    (Net::v6([0x100, 0, 0, 0], 64), RESERVED),
];

/// The IPv4 addresses within an IPv6 address: mapped, compatible, NAT64, 6to4 and Teredo.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let parts = address.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match parts {
        [0, 0, 0, 0, 0, 0xffff, high, low] => Some(v4(high, low)),
        // Translated (RFC 2765).
        [0, 0, 0, 0, 0xffff, 0, high, low] => Some(v4(high, low)),
        // `::` and `::1` are in 0.0.0.0/8 here.
        [0, 0, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        // Teredo hides the address of the client by inverting it.
        [0x2001, 0, _, _, _, _, high, low] => Some(v4(!high, !low)),
        _ => None,
    }
}

/// What may be dialled: the networks with a meaning, and private networks or not.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Whether private networks may be reached at all.
    pub private_networks: bool,
    /// Networks whose meaning the caller knows better, such as that of the API server. The first
    /// that contains an address decides, before [`NETWORKS`].
    pub known: Vec<(Net, Reach)>,
}

/// Of the API server of Kubernetes.
pub const API_SERVER: Reach = Reach::Refused("the configuration refuses it, as the API server");

impl Policy {
    /// What is reached through an address.
    fn reach(&self, address: IpAddr) -> Reach {
        let known = self.known.iter().chain(NETWORKS);
        let decided = known
            .filter(|(net, _)| net.contains(address))
            .map(|(_, reach)| *reach)
            .next();
        let IpAddr::V6(v6) = address else {
            return decided.unwrap_or(Reach::Public);
        };
        let inner = embedded(v6).map(|v4| self.reach(IpAddr::V4(v4)));
        match (decided, inner) {
            (Some(Reach::Refused(why)), _) | (_, Some(Reach::Refused(why))) => Reach::Refused(why),
            (Some(Reach::Private), _) | (_, Some(Reach::Private)) => Reach::Private,
            _ => Reach::Public,
        }
    }

    /// Whether the address of the configured proxy may be dialled; it is private in most clusters.
    pub fn check_proxy(&self, address: IpAddr) -> Result<()> {
        match self.reach(address) {
            Reach::Refused(why) => {
                let what = format!("the proxy's address {address} is not dialled: {why}");
                Err(Failure::refused("AddressRefused", what))
            }
            Reach::Private | Reach::Public => Ok(()),
        }
    }

    /// Whether all addresses of a server may be dialled. `from_public` is whether a public address
    /// has led here by a redirect, and is set if one of these is public.
    pub fn check(&self, addresses: &[IpAddr], from_public: &mut bool) -> Result<()> {
        let mut is_public = false;
        for address in addresses {
            let refused = |why: &str| {
                let what = format!("{address} is not dialled: {why}");
                Err(Failure::refused("AddressRefused", what))
            };
            match self.reach(*address) {
                Reach::Refused(why) => return refused(why),
                Reach::Private if !self.private_networks => {
                    return refused("it is in a private network, and privateNetworks is off");
                }
                Reach::Private if *from_public => {
                    return refused(
                        "a server with a public address redirected to this private one",
                    );
                }
                Reach::Private => {}
                Reach::Public => is_public = true,
            }
        }
        *from_public |= is_public;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRICT: Policy = Policy {
        private_networks: true,
        known: Vec::new(),
    };

    fn refused(policy: &Policy, text: &str) -> bool {
        let address = text.parse().expect("an address");
        policy.check(&[address], &mut false).is_err()
    }

    #[test]
    fn addresses_of_the_node_and_of_metadata_services_are_refused() {
        for address in [
            "127.0.0.1",
            "127.255.255.254",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "240.0.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "::",
            "::1",
            "fe80::1",
            "febf::1",
            "ff02::1",
            "fd00:ec2::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fd20:ce::254",
            "64:ff9b:1::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::1",
            "2001:0:1:2:3:4:8001:fffe", // 127.254.0.1, inverted
        ] {
            assert!(refused(&STRICT, address), "{address}");
        }
        for address in [
            "1.1.1.1",
            "10.0.0.1",
            "2606:4700::1",
            "fd12::1",
            "64:ff9b::1.1.1.1",
        ] {
            assert!(!refused(&STRICT, address), "{address}");
        }
    }

    #[test]
    fn private_networks_are_refused_when_they_are_switched_off() {
        let policy = Policy {
            private_networks: false,
            ..STRICT
        };
        for address in [
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "fd12::1",
            "fec0::1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "2002:a00:1::",
        ] {
            assert!(refused(&policy, address), "{address}");
            assert!(!refused(&STRICT, address), "{address}");
        }
        assert!(!refused(&policy, "172.32.0.1"));
        assert!(!refused(&policy, "100.128.0.1"));
    }

    #[test]
    fn the_api_server_is_refused_in_all_of_its_forms() {
        let policy = Policy {
            known: vec![("10.96.0.1".parse().expect("an address"), API_SERVER)],
            ..STRICT
        };
        for address in ["10.96.0.1", "::ffff:10.96.0.1", "64:ff9b::10.96.0.1"] {
            assert!(refused(&policy, address), "{address}");
        }
        assert!(!refused(&policy, "10.96.0.2"));
    }

    #[test]
    fn a_public_address_leads_to_no_private_one() {
        let mut from_public = false;
        let mut check = |text: &str| {
            let address = text.parse().expect("an address");
            STRICT.check(&[address], &mut from_public).is_ok()
        };
        assert!(check("10.0.0.1"), "private first");
        assert!(check("1.1.1.1"), "private to public");
        assert!(check("8.8.8.8"), "public to public");
        assert!(!check("10.0.0.1"), "public to private");
        assert!(!check("::ffff:192.168.0.1"), "in another form");
        assert!(!check("fd12::1"));
    }

    #[test]
    fn one_refused_address_of_a_name_refuses_the_name() {
        let addresses = |texts: &[&str]| -> Vec<IpAddr> {
            texts
                .iter()
                .map(|text| text.parse().expect("an address"))
                .collect()
        };
        let mut from_public = false;
        let mixed = addresses(&["1.1.1.1", "10.0.0.1"]);
        assert!(
            STRICT.check(&mixed, &mut from_public).is_ok(),
            "in any order"
        );
        assert!(from_public);
        assert!(STRICT.check(&mixed, &mut from_public).is_err());
        let rebound = addresses(&["1.1.1.1", "127.0.0.1"]);
        assert!(STRICT.check(&rebound, &mut false).is_err());
    }

    #[test]
    fn networks_are_parsed_with_their_limits() {
        for text in [
            "10.0.0.0/33",
            "::/129",
            "10.0.0",
            "10.0.0.0/",
            "a",
            "",
            "10.0.0.0/-1",
        ] {
            assert!(text.parse::<Net>().is_err(), "{text}");
        }
        let all: Net = "0.0.0.0/0".parse().expect("a network");
        assert!(all.contains("255.1.2.3".parse().expect("an address")));
        assert!(!all.contains("::1".parse().expect("an address")));
        let all: Net = "::/0".parse().expect("a network");
        assert!(all.contains("ff00::1".parse().expect("an address")));
    }

    proptest! {
        /// What is refused as IPv4 is refused in each form of IPv6 that contains it.
        #[test]
        fn no_form_of_ipv6_hides_an_address(bits: u32) {
            let v4 = Ipv4Addr::from_bits(bits);
            let is_refused = |address: IpAddr| matches!(STRICT.reach(address), Reach::Refused(_));
            let [high, low] = [(bits >> 16) as u16, bits as u16];
            let forms = [
                v4.to_ipv6_mapped(),
                v4.to_ipv6_compatible(),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0x2001, 0, 1, 2, 3, 4, !high, !low),
            ];
            for form in forms {
                prop_assert_eq!(is_refused(form.into()), is_refused(v4.into()), "{}", form);
            }
        }

        /// A network contains exactly the addresses that begin with its bits.
        #[test]
        fn a_network_contains_what_begins_like_it(own: u32, other: u32, bits in 0..=32u8) {
            let net = Net { address: Ipv4Addr::from_bits(own).into(), bits };
            let same = (own ^ other).leading_zeros() >= u32::from(bits);
            prop_assert_eq!(net.contains(Ipv4Addr::from_bits(other).into()), same);
        }
    }
}
