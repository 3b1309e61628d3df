use std::net::{IpAddr, Ipv6Addr};

/// Returns `true` if the server of a URL, of `HOST:PORT` or of a host is this machine: `localhost`, `127.0.0.0/8` or
/// `::1`. Such a server is not reached through a proxy.
///
/// ```
/// use overdrive_core::is_loopback;
///
/// assert!(is_loopback("http://localhost:9000/bucket") && is_loopback("127.0.0.1:80") && is_loopback("::1"));
/// assert!(!is_loopback("https://localhost.example.com"));
/// ```
pub fn is_loopback(address: &str) -> bool {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let server = authority
        .rsplit_once('@')
        .map_or(authority, |(_, server)| server);
    let host = match server
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
    {
        Some((host, port)) if port.is_empty() || port.starts_with(':') => host,
        _ if server.parse::<Ipv6Addr>().is_ok() => server,
        _ => server.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost")
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_host_names_and_addresses_are_this_machine() {
        for address in [
            "localhost",
            "LocalHost:80",
            "http://localhost",
            "http://localhost:5000/api?a=b@c",
            "https://user:secret@127.0.0.1:9/x",
            "127.3.2.1",
            "::1",
            "http://[::1]:8080",
            "[::1]",
        ] {
            assert!(is_loopback(address), "{address}");
        }
        for address in [
            "",
            "http://",
            "http://localhost.example.com",
            "localhost.example.com:80",
            "http://127.example.org",
            "127.0.0.1.example.org",
            "http://localhost@example.org",
            "http://localhost:80@example.org/",
            "http://example.org/localhost",
            "http://example.org#@localhost",
            "[::1].example.org",
            "128.0.0.1",
            "::2",
        ] {
            assert!(!is_loopback(address), "{address}");
        }
    }
}
