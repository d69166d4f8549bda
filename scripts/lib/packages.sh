# Debian packages: which ones each job needs, and their installation. Sourced after common.sh.

build_packages=(g++ cmake ninja-build nlohmann-json3-dev libcli11-dev libpcre2-dev libutf8proc-dev
  libjpeg62-turbo-dev libpng-dev libwebp-dev libgtest-dev python3 xz-utils)
check_packages=(git clang-format-14 clang libclang-rt-14-dev)
tidy_packages=(clang-tidy-19)

# Prints those of the named packages that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) in
      installed) ;;
      *) echo "$package" ;;
    esac
  done
}

# ensure_packages <package...>: installs what is missing, as root or with sudo; says what it does.
ensure_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "this is not Debian: the packages are yours to provide: $*"
    return
  fi
  local missing as_root=()
  mapfile -t missing < <(missing_packages "$@")
  if [ ${#missing[@]} -eq 0 ]; then
    return
  fi
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "these Debian packages are missing: ${missing[*]}
  Installing them takes root, and this user is not root and has no sudo. Ask an administrator to run
    apt-get install ${missing[*]}
  and start this script again."
    as_root=(sudo)
  fi
  say "installing Debian packages${as_root:+ with sudo}: ${missing[*]}"
  "${as_root[@]}" apt-get update -q >&2 ||
    say "apt-get update failed; trying with the package lists that are here"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "${missing[@]}" >&2 ||
    die "apt-get could not install: ${missing[*]}
  Its message above says why. Cadre builds on Debian 12; check the network and /etc/apt/sources.list."
}
