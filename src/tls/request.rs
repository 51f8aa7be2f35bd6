//! Certificate requests: created by the process that holds the key, and parsed by the one that
//! signs.
//!
//! Only the public key of a request is used, and the proof that its sender holds the private key;
//! the sender's name is known otherwise. So a few lines suffice to parse it: a sequence of a
//! sequence (version, name, key, attributes), an algorithm and a signature, as PKCS #10 (RFC 2986)
//! defines it in DER.

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateSigningRequestDer, alg_id};

use super::{Name, TlsError};

/// The DER prefix of a P-256 key, up to its point: algorithm id-ecPublicKey of prime256v1 (RFC
/// 5480), and a bit string of 65 bytes.
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// The algorithm ecdsa-with-SHA256 (RFC 5758).
const ECDSA_SHA256: [u8; 12] = [
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
];
const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;

/// Creates a key and a request for its certificate, both as PEM. The key is a secret.
pub fn make(name: &Name) -> Result<(String, String), TlsError> {
    let make = || {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name.to_string()])?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        let request = params.serialize_request(&key)?.pem()?;
        Ok((key.serialize_pem(), request))
    };
    make().map_err(|source| TlsError::Make {
        name: name.to_string(),
        source,
    })
}

/// The public key of a request.
#[derive(Debug)]
pub(super) struct Requested {
    point: Vec<u8>,
}

impl PublicKeyData for Requested {
    fn der_bytes(&self) -> &[u8] {
        &self.point
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Parses a request in PEM. The error describes what is wrong with it.
pub(super) fn read(pem: &[u8]) -> Result<Requested, &'static str> {
    let der = CertificateSigningRequestDer::from_pem_slice(pem).map_err(|_| "it is not PEM")?;
    let parts = parts(&der).ok_or("it is not a PKCS #10 request")?;
    if parts.algorithm != ECDSA_SHA256 {
        return Err("it is not signed with ECDSA and SHA-256");
    }
    let point = parts.key.strip_prefix(&P256);
    let point = point.filter(|point| point.len() == 65);
    let point = point.ok_or("its key is not on the curve P-256")?;
    let algorithms = ring::default_provider()
        .signature_verification_algorithms
        .all;
    let supported = algorithms.iter().find(|one| {
        one.public_key_alg_id() == alg_id::ECDSA_P256
            && one.signature_alg_id() == alg_id::ECDSA_SHA256
    });
    let supported = supported.ok_or("its kind of signature cannot be verified")?;
    let signed = supported.verify_signature(point, parts.signed, parts.signature);
    signed.map_err(|_| "its signature was not made with its key")?;
    Ok(Requested {
        point: point.to_vec(),
    })
}

struct Parts<'a> {
    signed: &'a [u8],
    key: &'a [u8],
    algorithm: &'a [u8],
    signature: &'a [u8],
}

fn parts(der: &[u8]) -> Option<Parts<'_>> {
    let (outer, rest) = element(der, SEQUENCE)?;
    if !rest.is_empty() {
        return None;
    }
    let (info, after) = element(outer.content, SEQUENCE)?;
    let (algorithm, after) = element(after, SEQUENCE)?;
    let (signature, after) = element(after, BIT_STRING)?;
    let (_version, inner) = element(info.content, INTEGER)?;
    let (_name, inner) = element(inner, SEQUENCE)?;
    let (key, _attributes) = element(inner, SEQUENCE)?;
    // The first byte counts unused bits: none.
    let signature = signature.content.strip_prefix(&[0])?;
    after.is_empty().then_some(Parts {
        signed: info.whole,
        key: key.whole,
        algorithm: algorithm.whole,
        signature,
    })
}

struct Element<'a> {
    whole: &'a [u8],
    content: &'a [u8],
}

/// The first element, which must have this tag, and the bytes after it.
fn element(bytes: &[u8], tag: u8) -> Option<(Element<'_>, &[u8])> {
    let (&first, after) = bytes.split_first().filter(|(first, _)| **first == tag)?;
    let (&length, after) = after.split_first()?;
    let (length, head) = match length {
        short @ 0..=0x7f => (usize::from(short), 2),
        0x81 => (usize::from(*after.first()?), 3),
        0x82 => (
            usize::from(*after.first()?) << 8 | usize::from(*after.get(1)?),
            4,
        ),
        _ => return None,
    };
    debug_assert_eq!(first, tag);
    let whole = bytes.get(..head + length)?;
    let element = Element {
        whole,
        content: &whole[head..],
    };
    Some((element, &bytes[head + length..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn der(pem: &str) -> Vec<u8> {
        CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
            .unwrap()
            .to_vec()
    }

    fn pem(der: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for three in der.chunks(3) {
            let value = three.iter().chain(&[0, 0]).take(3);
            let value = value.fold(0usize, |all, byte| all << 8 | usize::from(*byte));
            for at in 0..4 {
                let digit = DIGITS[value >> (18 - 6 * at) & 63];
                text.push(if at <= three.len() { digit.into() } else { '=' });
            }
        }
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
    }

    #[test]
    fn a_request_gives_its_key() {
        let (key, request) = make(&Name::node("node-1").unwrap()).unwrap();
        let key = KeyPair::from_pem(&key).unwrap();
        let read = read(request.as_bytes()).unwrap();
        assert_eq!(read.der_bytes(), key.public_key_raw());
        assert_eq!(
            pem(&der(&request)).replace('\n', ""),
            request.replace(['\r', '\n'], "")
        );
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert_eq!(read(b"hello").unwrap_err(), "it is not PEM");
        let (key, _) = make(&Name::controller().unwrap()).unwrap();
        assert_eq!(read(key.as_bytes()).unwrap_err(), "it is not PEM");
        assert_eq!(
            read(pem(b"hello").as_bytes()).unwrap_err(),
            "it is not a PKCS #10 request"
        );
    }

    #[test]
    fn fuzz_certificate_requests() {
        let requests = [0, 1].map(|_| make(&Name::node("node-1").unwrap()).unwrap().1);
        let points = requests
            .each_ref()
            .map(|request| read(request.as_bytes()).unwrap().point);
        let seeds = requests.each_ref().map(|request| der(request));
        let target = |bytes: &[u8]| {
            // No key is accepted without a signature made with it.
            if let Ok(found) = read(pem(bytes).as_bytes()) {
                assert!(points.contains(&found.point));
            }
            let _ = read(bytes);
        };
        slackwater_core::fuzz::fuzz("certificate requests", &seeds, target, |bytes| {
            assert!(parts(bytes).is_none_or(|parts| parts.algorithm == ECDSA_SHA256));
        });
    }

    proptest! {
        #[test]
        fn a_request_that_was_touched_is_refused(at in 0usize..1000, bit in 0u8..8) {
            let (_, request) = make(&Name::node("node-1").unwrap()).unwrap();
            let mut bytes = der(&request);
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            prop_assert!(read(pem(&bytes).as_bytes()).is_err());
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parts(&bytes);
        }
    }
}
