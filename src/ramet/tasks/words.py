"""Common English words, for games."""

from __future__ import annotations

from collections.abc import Mapping

_THREE = """
act add age aim air arm art ask bad bag bar bat bed bee big bit box boy bus but buy can cap car cat cow cry
cup cut day dig dog dry ear eat egg end eye fan far fat few fix fly fog fox fun gap gas get gum hat hen hit hot
ice ink jam jar job joy key kid law leg let lie lip log lot low man map mix mud net new nut oak odd off oil old
one own pan pay pen pet pie pig pot put rat raw red rib rob rod row rub run sad sea set shy sit six sky
son sun tap tea ten tie tin tip toe top toy try two use van war wax way wet win yes zoo
"""
_FOUR = """
able acid back bake ball band bank barn bath bean bear beat belt bend bird blow blue boat body boil bold bone book born
bowl burn bush busy cake calm camp card care cart case cave chin city clay club coal coat code cold cook cool copy cord
corn cost crow dark date dawn deep deer desk dirt dish door drum duck dust duty each earn east easy edge even exit face
fact fair fall farm fast feed feel film find fire firm fish five flag flat flow folk food foot fork form four free frog
full game gate gift girl give glad glow goat gold good gray grow half hall hand hard harm head hear heat help herb hide
high hill hold home hook hope horn hour huge hunt idea iron join jump just keep kind king kite knee lake lamp land last
late lead leaf left life lift like lime line lion list live loan long look loud love luck main make many mark meal meat
melt milk mind mine mint moon more move name near neck nest news next nice nine nose note oven over page pain pair park
part past path pear pick pine pink pipe plan play plus poem pole pond pool poor post pull pure push rain rare read rest
rice ride ring rise road roof room root rope rose rule safe sail salt same sand save seed sell send shed ship shoe shop
show side sign silk sing size skin slow snow soap sock soft soil song soup spot star stay stem step stir stop such suit
sure swim tail take talk tall tape task team tell tent test thin tide time tiny tool town trap tree trip true tube tune
turn unit upon vast very view vote wait walk wall warm wash wave weak wear week well west wide wild wind wine wing wish
wolf wood word work yard year zero
"""
_FIVE = """
about above actor adult after again agree alarm album alive allow alone angle angry apple arrow aside badge basic beach
beard beast begin below bench birth black blame blank blind block blood board bonus brain brand brave bread break brick
brief bring broad brown brush build bunch cabin cable candy carry catch cause chain chair chalk charm chart cheap check
cheek chest chief child choir civil claim class clean clear clerk climb clock cloth cloud coach coast coral count court
cover crack craft crane crash cream crowd crown curve dance delay depth dirty doubt draft drama dream dress drink drive
eager eagle early earth eight elbow empty enjoy enter equal error event every exact extra faint fairy faith false fancy
fault feast fence fever field fight final first flame flash fleet float flock flood floor flour fluid focus force forty
frame fresh front frost fruit giant glass globe glove grace grade grain grand grant grape graph grass great green greet
group guard guess guest guide habit happy harsh heart heavy hedge honey horse hotel house human humor image inner issue
jelly jewel joint judge juice knife knock label large laugh layer learn leave lemon level light limit local loose lower
loyal lucky lunch magic maple march match maybe metal meter minor model money month motor mount mouse mouth movie music
nerve never night noble noise north novel nurse ocean offer often olive onion opera orbit order other outer owner paint
panel paper party pasta patch peace pearl phone photo piano piece pilot pitch place plain plane plant plate point pound
power press price pride print prize proof proud pupil queen quick quiet quite radio raise ranch range rapid reach ready
reply rider right river robot rough round route royal salad sauce scale scarf scene score sense serve seven shade shake
shape share sharp sheep sheet shelf shell shine shirt shock shore short shout sight silly skill sleep slice slope small
smart smell smile smoke snack snake solid solve sorry sound south space spare speak speed spell spend spice spoon sport
staff stage stamp stand start state steam steel stick stone store storm story stove straw sugar sunny sweet swing table
teach thank theme thick thing think third three throw thumb tiger title toast today tooth topic total touch tough tower
track trade trail train treat trend trial tribe trick truck trust truth twist uncle under union unite until upper urban
usual valid value video visit voice wagon waste watch water wheat wheel where white whole woman world worry worth wound
write wrong young youth zebra
"""

WORDS: Mapping[int, tuple[str, ...]] = {
    length: tuple(sorted({word for word in text.split() if len(word) == length}))
    for length, text in ((3, _THREE), (4, _FOUR), (5, _FIVE))
}
"""Words of 3, 4 and 5 letters, in the order of the alphabet."""
